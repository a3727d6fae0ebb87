"""Phase and time of a campaign."""

from typing import Any

import pytest

from flows.display.key_figures import Phase, phase, time_line
from flows.display.tables import duration

STATUS: dict[str, Any] = {
    "state": "running",
    "cause": None,
    "steps": 7,
    "stop_at_step": 40,
    "early_stop": None,
    "doing": {"bootstrap-0": "stopped", "train-0": "train"},
    "ready": {"bootstrap-0": False, "train-0": True},
    "wall_seconds": 754.0,
    "step_seconds": 1.5,
    "eta_seconds": 49.5,
}


def running(doing: dict[str, str], *, ready: bool = True, **changes: Any) -> dict[str, Any]:
    """A status in which all these processes are of this attempt, and ready or not."""
    return {**STATUS, "doing": doing, "ready": dict.fromkeys(doing, ready), **changes}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (running({}), "preparing the run"),
        (
            running({"bootstrap-0": "warm start step 30 of at most 400"}),
            "making the start model: warm start step 30 of at most 400",
        ),
        (running({"bootstrap-0": "stopped", "evaluate-0": "starting"}), "preparing the run"),
        (running({"train-0": "loading the model"}, ready=False), "starting the trainer: loading the model"),
        (running({"train-0": "train"}), "training"),
        (running({"train-0": "stopped", "score-0": "score"}, steps=20), "ending the attempt"),
        (running({"train-0": "stopped", "evaluate-1": "evaluate"}, steps=40), "evaluating the trained model: evaluate"),
        (
            running({"train-0": "stopped", "evaluate-1": "stopped", "promote-0": "promote"}, steps=40),
            "deciding on promotion: promote",
        ),
        (
            running({"train-0": "stopped", "evaluate-1": "stopped", "promote-0": "stopped"}, steps=40),
            "ending the attempt",
        ),
        (running({"train-0": "train"}, state="finished"), "finished"),
        (running({"train-0": "train"}, state="stopped"), "stopped"),
        (running({"train-0": "train"}, state="killed", cause="nothing is alive"), "killed: nothing is alive"),
    ],
)
def test_each_phase_of_a_campaign_has_its_words(status: dict[str, Any], expected: str) -> None:
    assert str(phase(status)) == expected


def test_records_of_an_earlier_attempt_do_not_affect_the_phase() -> None:
    resumed = {**STATUS, "doing": {"train-0": "train", "evaluate-1": "evaluate"}, "ready": {}}
    assert phase(resumed) == Phase("preparing the run")


def test_the_time_line_has_elapsed_time_step_time_and_time_left() -> None:
    assert time_line(STATUS) == "12 min 34 s, 1.5 s per step, about 50 s left"
    assert time_line({**STATUS, "step_seconds": None, "eta_seconds": None}) == "12 min 34 s"
    assert time_line({**STATUS, "state": "finished", "eta_seconds": None}) == "12 min 34 s, 1.5 s per step"
    assert "left" not in time_line(running({"bootstrap-0": "starting"})), "no time of training yet"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (7500.0, "2 h 5 min"),
        (93_600.0, "1 d 2 h"),
    ],
)
def test_a_duration_has_two_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said
