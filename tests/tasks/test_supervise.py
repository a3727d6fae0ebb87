"""The supervisor of one stage process, over a process that does as it is told."""

import logging
import re
import signal
import threading

import pytest
from support.campaigns.campaigns import wait_until
from support.stages.supervised import IMPATIENT, PATIENT, Supervised, is_gone

from configs.operation import SupervisionConfig
from millrace.errors import InputError, LedgerMismatch, PlaceYielded, StageDied
from millrace.runtime.messages import FENCED, MISCOUNTED, USER_ERROR, YIELDED, Event
from storage.errors import Fenced
from tasks.stop import STOP, STOP_NOW


@pytest.mark.slow
def test_milestones_reach_people_events_become_events_and_beats_and_broken_lines_neither(
    supervised: Supervised,
) -> None:
    supervised.run("say", "beat")
    assert supervised.said() == ["trainer ready"]
    assert supervised.told == [Event(kind="staleness.bound-hit", payload={"rollouts_dropped": 8})]


@pytest.mark.slow
def test_a_stage_that_beats_may_take_as_long_as_it_likes(supervised: Supervised) -> None:
    supervised.run("beat", supervision=IMPATIENT)
    assert supervised.told == []


@pytest.mark.slow
def test_a_stage_whose_main_thread_hangs_is_named_with_where_and_killed_with_all_it_started(
    supervised: Supervised,
) -> None:
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
def test_a_stage_that_is_stopped_is_named_and_killed_though_it_can_not_say_where(supervised: Supervised) -> None:
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


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (USER_ERROR, InputError),
        (FENCED, Fenced),
        (MISCOUNTED, LedgerMismatch),
        (YIELDED, PlaceYielded),
    ],
)
def test_the_last_milestone_is_the_sentence_of_an_end_for_good(
    supervised: Supervised, code: int, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        supervised.run("say", f"exit:{code}")


def test_a_stage_that_is_asked_to_stop_and_does_is_no_failure_though_it_had_not_begun(supervised: Supervised) -> None:
    STOP.set()
    supervised.run("hang")


def test_a_stage_that_is_asked_to_stop_while_it_works_is_not_taken_to_hang(supervised: Supervised) -> None:
    threading.Timer(0.5, STOP.set).start()
    supervised.run("hang", supervision=PATIENT)
    assert supervised.told == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [["deaf", "hang"], ["stop"]])
def test_a_stage_that_does_not_stop_when_asked_is_killed_and_that_is_said(
    supervised: Supervised, words: list[str]
) -> None:
    threading.Timer(1, STOP.set).start()
    hasty = SupervisionConfig(hang_seconds=60.0, start_seconds=60.0, drain_seconds=0.5)
    with pytest.raises(StageDied):
        supervised.run(*words, supervision=hasty)
    assert is_gone(supervised.pid)
    (event,) = supervised.told
    assert event.kind == "stage.killed"
    assert str(event.payload["sentence"]).startswith("train-0 was asked to stop, and killed after ")


@pytest.mark.slow
def test_a_stage_that_finishes_its_work_may_take_longer_than_one_that_has_none(supervised: Supervised) -> None:
    threading.Timer(1, STOP.set).start()
    supervised.run("deaf", "beat", supervision=IMPATIENT)
    assert supervised.told == [], "four seconds of work, with heartbeats"


@pytest.mark.slow
def test_who_asks_once_more_gets_the_stage_killed_at_once(supervised: Supervised) -> None:
    threading.Timer(1, STOP.set).start()
    threading.Timer(1.5, STOP_NOW.set).start()
    with pytest.raises(StageDied):
        supervised.run("deaf", "hang")


@pytest.mark.slow
def test_a_stage_that_hangs_while_it_drains_is_killed_early(supervised: Supervised) -> None:
    threading.Timer(1, STOP.set).start()
    with pytest.raises(StageDied):
        supervised.run("deaf", "hang", supervision=IMPATIENT)
    assert "stuck_in_the_middle_of_a_step" in supervised.log.read_text()
