"""The launchers of several hosts: together they are one trainer. Here all are on loopback, with a rank each."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.campaigns.campaigns import wait_until
from support.stages.host_launchers import HostLaunchers, Launcher
from support.stages.supervised import is_gone

from millrace.runtime.exit_codes import DRAINED, SHOW_STACKS, USER_ERROR, YIELDED

ALL = r"the trainer starts on 2 hosts: 127\.0\.0\.1, 127\.0\.0\.1"
SHRUNK = r"the trainer starts on 1 of 2 hosts, with 1 of 2 ranks, because host 1 has not come"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def launched(folder: Path) -> Iterator[list[HostLaunchers]]:
    made: list[HostLaunchers] = []
    yield made
    for launchers in made:
        launchers.kill()


def two(made: list[HostLaunchers], folder: Path, *words: str) -> tuple[Launcher, Launcher]:
    made.append(HostLaunchers(folder, words))
    return made[0].start(0), made[0].start(1)


@pytest.mark.slow
def test_both_launchers_start_together_and_end_with_rank_0(launched: list[HostLaunchers], folder: Path) -> None:
    leader, member = two(launched, folder, "pid say", "pid")
    assert (leader.end(), member.end()) == (0, 0)
    leader.wait_for(ALL)
    assert len(leader.rank_pids()) == len(member.rank_pids()) == 1


@pytest.mark.slow
def test_a_rank_killed_on_another_host_ends_the_ranks_of_all(launched: list[HostLaunchers], folder: Path) -> None:
    leader, member = two(launched, folder, "pid hang", "pid kill:9")
    assert member.end() == -signal.SIGKILL
    assert leader.end() == 1
    leader.wait_for(r"host 1 of the trainer, at 127\.0\.0\.1, is lost: all ranks end")
    wait_until(lambda: is_gone(leader.rank_pids()[0]), "rank 0 to be gone")


@pytest.mark.extended
def test_the_exit_code_of_a_user_error_survives_the_loss_of_the_other_host(
    launched: list[HostLaunchers], folder: Path
) -> None:
    leader, member = two(launched, folder, f"pid exit:{USER_ERROR}", "pid hang")
    assert (leader.end(), member.end()) == (USER_ERROR, 1)


@pytest.mark.extended
def test_the_ranks_of_a_host_that_loses_host_0_end(launched: list[HostLaunchers], folder: Path) -> None:
    leader, member = two(launched, folder, "pid hang", "pid hang")
    leader.wait_for_ranks(1)
    member.wait_for_ranks(1)
    leader.process.kill()
    assert member.end() == 1
    member.wait_for("host 0 of the trainer is lost: all ranks here end")
    wait_until(lambda: is_gone(member.rank_pids()[0]), "its rank to be gone")


@pytest.mark.slow
def test_asked_for_stacks_the_ranks_of_all_hosts_write_theirs(launched: list[HostLaunchers], folder: Path) -> None:
    leader, member = two(launched, folder, "pid hang", "pid hang")
    leader.wait_for_ranks(1)
    member.wait_for_ranks(1)
    leader.process.send_signal(SHOW_STACKS)
    for launcher in (leader, member):
        wait_until(
            lambda log=launcher.log: "Current thread" in log.read_text(),  # type: ignore[misc]
            "the stack of a rank",
        )


@pytest.mark.extended
def test_asked_to_stop_rank_0_drains_and_the_others_end_well(launched: list[HostLaunchers], folder: Path) -> None:
    leader, member = two(launched, folder, "drain", "pid hang")
    leader.wait_for_ranks(1)
    member.wait_for_ranks(1)
    for launcher in (leader, member):
        launcher.process.terminate()
    assert (leader.end(), member.end()) == (DRAINED, DRAINED)


@pytest.mark.extended
def test_if_host_0_alone_stops_the_others_wait_for_its_successor(launched: list[HostLaunchers], folder: Path) -> None:
    leader, member = two(launched, folder, "drain", "pid hang")
    leader.wait_for_ranks(1)
    member.wait_for_ranks(1)
    leader.process.terminate()
    assert leader.end() == DRAINED
    wait_until(lambda: member.doing() == "waiting for host 0 of the trainer", "the other host to wait")
    assert is_gone(member.rank_pids()[0])


@pytest.mark.extended
def test_a_host_asked_to_stop_alone_leaves_and_the_rest_start_again(
    launched: list[HostLaunchers], folder: Path
) -> None:
    leader, member = two(launched, folder, "drain", "pid hang")
    leader.wait_for_ranks(1)
    member.wait_for_ranks(1)
    member.process.stdin.close()  # type: ignore[union-attr]
    assert member.end() == DRAINED
    assert leader.end() == DRAINED
    leader, successor = launched[0].start(0), launched[0].start(1)
    leader.wait_for(ALL)
    successor.wait_for_ranks(1)


@pytest.mark.extended
def test_with_min_hosts_the_trainer_starts_without_a_host_until_it_comes(
    launched: list[HostLaunchers], folder: Path
) -> None:
    launched.append(HostLaunchers(folder, ("drain", "pid hang"), min_hosts=1))
    leader = launched[0].start(0)
    leader.wait_for(SHRUNK)
    leader.wait_for_ranks(1)
    member = launched[0].start(1)
    assert leader.end() == DRAINED
    leader = launched[0].start(0)
    leader.wait_for(ALL)
    member.wait_for_ranks(1)


@pytest.mark.slow
def test_a_host_gives_its_place_back_when_host_0_stays_away(launched: list[HostLaunchers], folder: Path) -> None:
    impatient = (
        "import sys; from millrace.runtime.ranks import hosts; hosts._YIELD_SECONDS = 2.0; "
        "hosts.end_as(hosts.main(hosts.Hosts.from_json(sys.argv[1]), sys.argv[2:]))"
    )
    launched.append(HostLaunchers(folder, ("pid hang", "pid hang")))
    member = launched[0].start(1, impatient)
    assert member.end() == YIELDED
    assert member.lines() == ["host 0 of the trainer has been away for 2 s: its job can run here"]
