"""The supervisor of a stage of several ranks: to it they are one process, and none is left behind."""

import logging
import re
import threading

import pytest
from support.campaigns.campaigns import wait_until
from support.stages.supervised import IMPATIENT, Supervised, is_gone

from millrace.errors import StageDied
from millrace.runtime.messages import FENCED
from storage.errors import Fenced
from tasks.stop import STOP

pytestmark = pytest.mark.parametrize("supervised", ["command"], indirect=True)


def all_gone(supervised: Supervised) -> bool:
    """The launcher, and every rank that said its pid."""
    return all(is_gone(pid) for pid in (supervised.pid, *(int(line) for line in supervised.said() if line.isdigit())))


@pytest.mark.slow
def test_rank_0_is_the_stage_and_ends_when_all_have(supervised: Supervised) -> None:
    supervised.run_ranks("say beat", "pid")
    assert "trainer ready" in supervised.said()
    assert [event.kind for event in supervised.told] == ["staleness.bound-hit"]
    assert all_gone(supervised)


def test_the_exit_code_and_the_last_words_of_rank_0_are_the_stages(supervised: Supervised) -> None:
    with pytest.raises(Fenced):
        supervised.run_ranks(f"say exit:{FENCED}", "hang")


def test_a_rank_that_is_killed_is_the_cause_and_the_others_end_with_it(supervised: Supervised) -> None:
    with pytest.raises(StageDied) as died:
        supervised.run_ranks("pid hang", "pid kill:9", "pid hang")
    assert str(died.value).splitlines()[0] == "train-0 was killed by SIGKILL"
    wait_until(lambda: all_gone(supervised), "all ranks to be gone")


def test_asked_to_stop_rank_0_drains_and_nobody_else_hears_of_it(supervised: Supervised) -> None:
    # A rank that got the signal too would end by it at once, and so would the stage.
    def stop() -> None:
        wait_until(lambda: len(supervised.said()) == 2, "both ranks to have begun")
        STOP.set()

    threading.Thread(target=stop).start()
    supervised.run_ranks("drain", "pid hang")
    assert supervised.log.read_text().count("Sending process") == 1, "torchrun ended it, after rank 0 had"
    wait_until(lambda: all_gone(supervised), "all ranks to be gone")


def test_asked_to_stop_before_there_are_ranks_it_is_no_failure(supervised: Supervised) -> None:
    STOP.set()
    supervised.run_ranks("pid hang", "pid hang")
    assert supervised.said() == []


@pytest.mark.slow
def test_ranks_that_hang_say_where_each_of_them_does_and_are_killed(supervised: Supervised) -> None:
    with pytest.raises(StageDied) as died:
        supervised.run_ranks("pid beat hang", "drain", supervision=IMPATIENT)
    sentence = str(died.value).splitlines()[0]
    expected = "train-0 hangs: no sign of progress for N s; last activity: train; the limit is supervision.hang_seconds"
    assert re.sub(r"\d+ s;", "N s;", sentence) == expected
    assert {"stuck_in_the_middle_of_a_step", "drain"} <= set(re.findall(r" in (\w+)", supervised.log.read_text()))
    assert len(supervised.said(logging.ERROR)) == 1
    wait_until(lambda: all_gone(supervised), "all ranks to be gone")
