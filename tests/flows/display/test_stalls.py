"""Runs whose stages live and yet get nowhere: look by look, without a clock."""

from typing import Any

import pytest

from flows.display.ui_reporter import StallDetector
from millrace.runtime.messages import LOADING, STARTING, STOPPED, Event

DOING = {"generate-0": "waiting for room under max_staleness", "train-0": "waiting for scored groups"}


def status(*, steps: int = 5, generated: int = 640, trained: int = 512, **values: Any) -> dict[str, Any]:
    """A look at a run."""
    ledger = {
        "generated": {"rollouts": generated, "tokens": 3 * generated},
        "trained": {"rollouts": trained, "tokens": 3 * trained},
        "dropped": {},
    }
    return {"steps": steps, "ledger": ledger, "doing": DOING, "advances": 3, **values}


def test_a_stall_is_reported_once_with_the_activity_of_each_stage() -> None:
    detector = StallDetector(60)
    assert [detector.look(status(), now) for now in (1000, 1030, 1059)] == [None] * 3
    expected = Event(kind="pipeline.stalled", payload={"seconds": 60, "doing": DOING})
    assert [detector.look(status(), now) for now in (1060, 1061, 2000)] == [expected, None, None]


@pytest.mark.parametrize("moved", [{"generated": 648}, {"trained": 520}, {"steps": 6}, {"steps": 4}])
def test_any_movement_restarts_the_clock(moved: dict[str, int]) -> None:
    detector = StallDetector(60)
    looks = [
        (status(), 0), (status(), 59), (status(**moved), 60), (status(**moved), 119), (status(**moved), 120),
        (status(), 121), (status(), 181),
    ]  # fmt: skip
    reported = [now for look, now in looks if detector.look(look, now) is not None]
    assert reported == [120, 181]


def test_progress_within_a_long_step_is_not_a_stall() -> None:
    detector = StallDetector(60)
    assert [detector.look(status(advances=now), now) for now in range(0, 600, 30)] == [None] * 20
    assert detector.look(status(advances=570), 630) is not None


@pytest.mark.parametrize("activity", [STARTING, LOADING, STOPPED])
def test_time_does_not_count_while_a_stage_loads_or_has_not_started(activity: str) -> None:
    detector = StallDetector(60)
    waiting = status(doing={**DOING, "generate-0": activity, "bootstrap-0": STOPPED})
    assert [detector.look(waiting, now) for now in (0, 100, 500)] == [None] * 3
    started = status(doing={**DOING, "bootstrap-0": STOPPED})
    assert detector.look(started, 559) is None
    assert detector.look(started, 560) is not None
