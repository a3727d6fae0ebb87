"""The supervisor of one stage process, over a fake stage that follows a script."""

import logging
import re
import signal
import threading

import pytest
from support.campaigns.campaigns import wait_until
from support.stages.fake_stage import ERRORS
from support.stages.supervised import IMPATIENT, PATIENT, Supervised, is_gone

from configs.operation import SupervisionConfig
from millrace.errors import FENCED, USER_ERROR, StageDied
from millrace.runtime.messages import Event
from tasks.stop import STOP, STOP_NOW

HASTY = SupervisionConfig(hang_seconds=60.0, drain_seconds=0.5)


def stop_after(seconds: float) -> None:
    threading.Timer(seconds, STOP.set).start()


@pytest.mark.slow
def test_milestones_are_logged_and_events_are_emitted(supervised: Supervised) -> None:
    supervised.run("say", "beat", supervision=IMPATIENT)
    assert supervised.said() == ["trainer ready"]
    # Heartbeats, even longer than hang_seconds, and broken lines are neither.
    assert supervised.told == [Event(kind="staleness.bound-hit", payload={"rollouts_dropped": 8})]


@pytest.mark.slow
def test_a_hung_stage_is_killed_with_its_children_and_its_stacks_are_logged(supervised: Supervised) -> None:
    with pytest.raises(StageDied) as died:
        supervised.run("child", "hang", supervision=IMPATIENT)
    sentence, *log = str(died.value).splitlines()
    expected = "train-0 hangs: no sign of progress for N s; last activity: train; the limit is supervision.hang_seconds"
    assert re.sub(r"\d+ s;", "N s;", sentence) == expected
    assert "stuck_in_the_middle_of_a_step" in "\n".join(log), "the stack of its main thread"
    (error,) = supervised.said(logging.ERROR)
    assert error.startswith(sentence)
    (event,) = supervised.told
    assert (event.kind, event.payload["stage"], event.payload["doing"]) == ("stage.hung", "train-0", "train")
    assert event.payload["seconds"] >= IMPATIENT.hang_seconds
    (child,) = map(int, supervised.said())
    wait_until(lambda: is_gone(supervised.pid) and is_gone(child), "the stage and its child to be gone")


@pytest.mark.slow
def test_a_suspended_stage_is_killed_though_it_can_not_log_its_stacks(supervised: Supervised) -> None:
    with pytest.raises(StageDied):
        supervised.run("stop", supervision=IMPATIENT)
    assert is_gone(supervised.pid)
    assert supervised.log.read_text() == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["exit:3"], "train-0 exited with code 3"),
        ([f"kill:{signal.SIGKILL:d}"], "train-0 was killed by SIGKILL"),
        ([f"kill:{signal.SIGSEGV:d}"], "train-0 was killed by SIGSEGV"),
    ],
)
def test_a_stage_that_dies_is_named_with_its_cause(supervised: Supervised, words: list[str], sentence: str) -> None:
    with pytest.raises(StageDied) as died:
        supervised.run(*words)
    assert str(died.value).splitlines()[0] == sentence


@pytest.mark.parametrize("code", ERRORS)
def test_an_error_with_an_exit_code_is_raised_as_the_stage_reported_it(supervised: Supervised, code: int) -> None:
    with pytest.raises(type(ERRORS[code])) as raised:
        supervised.run("say", f"error:{code}")
    assert vars(raised.value) == vars(ERRORS[code])
    assert supervised.said(logging.ERROR) == [str(ERRORS[code])]


@pytest.mark.parametrize("word", [f"exit:{USER_ERROR}", f"exit:{FENCED}"])
def test_an_exit_code_without_its_error_is_a_fault(supervised: Supervised, word: str) -> None:
    with pytest.raises(StageDied):
        supervised.run("say", word)


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_stage_that_stops_on_request_is_not_a_failure(supervised: Supervised, seconds: float) -> None:
    stop_after(seconds)
    supervised.run("hang", supervision=PATIENT)
    assert supervised.told == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [["deaf", "hang"], ["stop"]])
def test_a_stage_that_does_not_drain_in_time_is_killed_and_reported(supervised: Supervised, words: list[str]) -> None:
    stop_after(1)
    with pytest.raises(StageDied):
        supervised.run(*words, supervision=HASTY)
    assert is_gone(supervised.pid)
    (event,) = supervised.told
    assert event.kind == "stage.killed"
    assert str(event.payload["sentence"]).startswith("train-0 was asked to stop, and killed after ")


def test_an_evaluation_that_does_not_drain_in_time_is_killed_and_is_not_a_failure(supervised: Supervised) -> None:
    supervised.name = "evaluate-0"
    stop_after(0.5)
    supervised.run("deaf", "hang", supervision=HASTY)
    assert is_gone(supervised.pid)
    assert supervised.told == [], "it repeats its work, so there is no incident"
    assert supervised.said()[-1].startswith("evaluate-0 was asked to stop, and killed after ")


@pytest.mark.slow
def test_a_stage_with_heartbeats_may_take_its_time_to_drain(supervised: Supervised) -> None:
    stop_after(1)
    supervised.run("deaf", "beat", supervision=IMPATIENT)
    assert supervised.told == [], "four seconds of work, with heartbeats"


@pytest.mark.slow
def test_a_second_request_kills_the_stage_at_once(supervised: Supervised) -> None:
    stop_after(1)
    threading.Timer(1.5, STOP_NOW.set).start()
    with pytest.raises(StageDied):
        supervised.run("deaf", "hang")


@pytest.mark.slow
def test_a_stage_that_hangs_while_it_drains_is_killed_early(supervised: Supervised) -> None:
    stop_after(1)
    with pytest.raises(StageDied):
        supervised.run("deaf", "hang", supervision=IMPATIENT)
    assert "stuck_in_the_middle_of_a_step" in supervised.log.read_text()
