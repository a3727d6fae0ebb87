"""Phase, time and speed of a campaign."""

from typing import Any

import pytest

from flows.display.progress import Phase, Rates, phase, time_line
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
        (running({"bootstrap-0": "stopped"}), "starting the stages"),
        (running({"bootstrap-0": "stopped", "evaluate-0": "starting"}), "starting the stages"),
        (running({"train-0": "loading the model"}, ready=False), "starting the trainer: loading the model"),
        (running({"train-0": "train"}), "training"),
        (running({"train-0": "train"}, steps=40), "draining the stages"),
        (running({"train-0": "stopped"}, steps=20, stop_at_step=20), "draining the stages"),
        (running({"train-0": "train"}, early_stop="no better"), "draining the stages"),
        (running({"train-0": "train", "generate-0": "stopped", "score-0": "score"}), "training"),
        (running({"train-0": "train", "generate-0": "stopped", "score-0": "stopped"}), "draining the stages"),
        (running({"train-0": "stopped", "evaluate-1": "evaluate"}, steps=40), "evaluating the trained model: evaluate"),
        (
            running({"train-0": "stopped", "evaluate-1": "stopped", "promote-0": "promote"}, steps=40),
            "deciding on promotion: promote",
        ),
        (
            running({"train-0": "stopped", "evaluate-1": "stopped", "promote-0": "stopped"}, steps=40),
            "writing the report",
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


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def looks(counts: list[int], *, every: float, step_seconds: float | None = None) -> list[dict[str, float]]:
    """The rates at each look, if a trainer has counted these tokens by then."""
    clock = Clock()
    rates = Rates(clock)
    all_rates = []
    for count in counts:
        all_rates.append(rates.look({"tokens": {"train": count}, "step_seconds": step_seconds}))
        clock.now += every
    return all_rates


def test_rates_are_averages_over_ten_seconds_and_unknown_before() -> None:
    rates = looks([100 * (look // 4) for look in range(41)], every=0.5)
    assert rates[:20] == [{}] * 20
    assert rates[20:] == [{"train": 50.0}] * 21, "a hundred tokens every two seconds, never 0"


def test_rates_span_several_steps_if_steps_take_long() -> None:
    rates = looks([600 * (look // 6) for look in range(60)], every=10.0, step_seconds=60.0)
    later = [rate["train"] for rate in rates[20:]]
    assert set(later) == {10.0}


def test_rates_are_what_they_are_now_and_never_negative() -> None:
    rates = looks([0, 100, 200, 200, 200, 150], every=10.0)
    assert [rate.get("train") for rate in rates] == [None, 10.0, 10.0, 0.0, 0.0, 0.0]


def test_the_time_line_has_elapsed_time_step_time_and_time_left() -> None:
    assert time_line(STATUS, {}) == "12 min 34 s, 1.5 s per step, about 50 s left"
    assert time_line({**STATUS, "step_seconds": None, "eta_seconds": None}, {}) == "12 min 34 s"
    assert time_line({**STATUS, "state": "finished", "eta_seconds": None}, {}) == "12 min 34 s, 1.5 s per step"
    assert time_line(running({"bootstrap-0": "starting"}), {}) == "12 min 34 s, 1.5 s per step", (
        "no time of training yet"
    )


def test_a_first_step_that_takes_minutes_is_announced() -> None:
    waiting = {
        **STATUS,
        "step_seconds": None,
        "eta_seconds": None,
        "rollouts_per_step": 128,
        "ledger": {"generated": {"rollouts": 20, "tokens": 160}},
    }
    assert "4 min 16 s" in time_line(waiting, {"generate": 4.0})
    assert time_line(waiting, {"generate": 400.0}) == time_line(waiting, {})
    assert "4 min 16 s" not in time_line({**waiting, "step_seconds": 300.0}, {"generate": 4.0})


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
