"""The state of a run: by its recorded end, and without one by its signs of life."""

import time

import pytest

from millrace.runs.record import CONTROLLER, KILLED_SECONDS, AttemptEnd, EndState, RunState, of_attempt, run_state


@pytest.mark.parametrize("how", ["finished", "stopped", "failed"])
def test_a_recorded_end_decides_whoever_still_writes(how: EndState) -> None:
    records = {"train-0": {"t": time.time()}}
    end = AttemptEnd(state=how, cause="the disk is full")
    assert run_state(end, time.time(), records) == RunState(name=how, cause="the disk is full")


@pytest.mark.parametrize("alive", ["train-0", f"{CONTROLLER}-0", None])
def test_without_an_end_any_sign_of_life_means_running(alive: str | None) -> None:
    old = time.time() - 2 * KILLED_SECONDS
    records = {name: {"t": time.time() if name == alive else old} for name in ("train-0", f"{CONTROLLER}-0")}
    started = old if alive else time.time()
    assert run_state(None, started, records).name == "running"


def test_a_run_in_which_nothing_is_alive_was_killed_and_says_why() -> None:
    old = time.time() - 2 * KILLED_SECONDS
    state = run_state(None, old, {"train-0": {"t": old}, f"{CONTROLLER}-0": {"t": old}})
    assert state.name == "killed"
    assert state.cause


def test_what_an_earlier_attempt_wrote_is_no_sign_of_life() -> None:
    records = {"train-0": {"t": 1.0, "attempt": 0}, "score-0": {"t": 1.0, "attempt": 1}}
    assert list(of_attempt(1, records)) == ["score-0"]
