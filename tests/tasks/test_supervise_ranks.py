"""The supervisor of a stage of several ranks, which it treats as one process and ends together."""

import logging
import re
import threading

import pytest
from support.campaigns.campaigns import wait_until
from support.stages.supervised import IMPATIENT, Supervised, is_gone

from millrace.errors import FENCED, StageDied
from storage.errors import Fenced
from tasks.stop import STOP

pytestmark = pytest.mark.parametrize("supervised", ["command"], indirect=True)


def all_gone(supervised: Supervised) -> bool:
    """Whether the launcher and every rank that reported its pid have ended."""
    return all(is_gone(pid) for pid in (supervised.pid, *(int(line) for line in supervised.said() if line.isdigit())))


@pytest.mark.slow
def test_rank_0_reports_for_the_stage(supervised: Supervised) -> None:
    supervised.run_ranks("say beat", "pid")
    assert "trainer ready" in supervised.said()
    assert [event.kind for event in supervised.told] == ["staleness.bound-hit"]
    assert all_gone(supervised)


def test_the_exit_code_of_rank_0_is_that_of_the_stage(supervised: Supervised) -> None:
    with pytest.raises(Fenced):
        supervised.run_ranks(f"say error:{FENCED}", "hang")


def test_a_killed_rank_is_the_cause_and_ends_the_others(supervised: Supervised) -> None:
    with pytest.raises(StageDied) as died:
        supervised.run_ranks("pid hang", "pid kill:9", "pid hang")
    assert str(died.value).splitlines()[0] == "train-0 was killed by SIGKILL"
    wait_until(lambda: all_gone(supervised), "all ranks to be gone")


def test_only_rank_0_gets_the_request_to_drain(supervised: Supervised) -> None:
    # A rank that got the signal too would end by it at once, and so would the stage.
    def stop() -> None:
        wait_until(lambda: len(supervised.said()) == 2, "both ranks to have begun")
        STOP.set()

    threading.Thread(target=stop).start()
    supervised.run_ranks("drain", "pid hang")
    assert supervised.log.read_text().count("Sending process") == 1, "torchrun ended it, after rank 0 had"
    wait_until(lambda: all_gone(supervised), "all ranks to be gone")


def test_a_stop_before_the_ranks_start_is_not_a_failure(supervised: Supervised) -> None:
    STOP.set()
    supervised.run_ranks("pid hang", "pid hang")
    assert supervised.said() == []


@pytest.mark.slow
def test_hung_ranks_log_their_stacks_and_are_killed(supervised: Supervised) -> None:
    with pytest.raises(StageDied) as died:
        supervised.run_ranks("pid beat hang", "drain", supervision=IMPATIENT)
    sentence = str(died.value).splitlines()[0]
    expected = "train-0 hangs: no sign of progress for N s; last activity: train; the limit is supervision.hang_seconds"
    assert re.sub(r"\d+ s;", "N s;", sentence) == expected
    assert {"stuck_in_the_middle_of_a_step", "drain"} <= set(re.findall(r" in (\w+)", supervised.log.read_text()))
    assert len(supervised.said(logging.ERROR)) == 1
    wait_until(lambda: all_gone(supervised), "all ranks to be gone")
