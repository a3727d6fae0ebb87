"""The launchers of several hosts: together they are one trainer. Here all are on loopback, with a rank each."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.campaigns.campaigns import wait_until
from support.stages import fake_stage
from support.stages.supervised import is_gone

from millrace.errors import DRAINED, USER_ERROR, YIELDED, PlaceYielded
from millrace.runtime.arguments import Hosts
from millrace.runtime.messages import Event, Heartbeat, read_line


@dataclass
class Launcher:
    """One launcher; its supervisor is this process."""

    process: subprocess.Popen[str]
    output: Path
    log: Path

    def lines(self) -> list[str]:
        """The milestones so far, of the launcher and of its ranks."""
        found = [_read(line) for line in self.output.read_text().splitlines()]
        return [line for line in found if isinstance(line, str)]

    def rank_pids(self) -> list[int]:
        """Of all ranks that have said theirs, the latest last."""
        return [int(line) for line in self.lines() if re.fullmatch(r"\d+", line)]

    def wait_for(self, sentence: str, times: int = 1) -> None:
        """Until it has said this, a regular expression, so many times."""
        wait_until(
            lambda: sum(bool(re.fullmatch(sentence, line)) for line in self.lines()) >= times, f"{sentence!r}", 60
        )

    def wait_for_ranks(self, number: int) -> None:
        """Until so many ranks have said their process ids."""
        wait_until(lambda: len(self.rank_pids()) >= number, f"{number} ranks", 60)

    def end(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(60)


@dataclass
class HostLaunchers:
    """Launchers of `hosts` hosts with a rank each; `words` are those of the ranks, from rank 0 on."""

    folder: Path
    words: tuple[str, ...] = ()
    hosts: int = 2
    min_hosts: int = 2
    launchers: list[Launcher] = field(default_factory=list)

    def start(self, host: int, program: str = "") -> Launcher:
        """`program`: Python that runs the launcher, if not the module itself."""
        hosts = Hosts(
            run_url=str(self.folder / "run"),
            attempt=0,
            host=host,
            hosts=self.hosts,
            min_hosts=self.min_hosts,
            join_seconds=5.0,
            network="127.0.0.0/8",
            ranks=1,
        )
        start = ["-c", program] if program else ["-m", "millrace.runtime.host_launcher"]
        number = len(self.launchers)
        output, log = self.folder / f"output-{number}", self.folder / f"log-{number}"
        with output.open("w") as stdout, log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *start, hosts.to_json(), fake_stage.__file__, " / ".join(self.words)],
                stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True, text=True,
            )  # fmt: skip
        self.launchers.append(Launcher(process, output, log))
        return self.launchers[-1]

    def kill(self) -> None:
        """The launchers that are left, and with them their ranks."""
        for launcher in self.launchers:
            launcher.process.send_signal(signal.SIGKILL)
            launcher.process.wait()


def _read(line: str) -> Heartbeat | Event | str | None:
    try:
        return read_line(line)
    except (ValueError, KeyError, json.JSONDecodeError):
        # A line that is still being written.
        return None


ALL = r"the trainer starts on 2 hosts: 127\.0\.0\.1, 127\.0\.0\.1"
SHRUNK = r"the trainer starts on 1 of 2 hosts, with 1 of 2 ranks, because host 1 has not come"


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[HostLaunchers]:
    launchers = HostLaunchers(tmp_path)
    yield launchers
    launchers.kill()


def start_both(launchers: HostLaunchers, *words: str) -> tuple[Launcher, Launcher]:
    launchers.words = words
    return launchers.start(0), launchers.start(1)


@pytest.mark.slow
def test_both_launchers_start_together_and_end_with_rank_0(launchers: HostLaunchers) -> None:
    leader, member = start_both(launchers, "pid say", "pid")
    assert (leader.end(), member.end()) == (0, 0)
    leader.wait_for(ALL)
    assert len(leader.rank_pids()) == len(member.rank_pids()) == 1


@pytest.mark.slow
def test_a_rank_killed_on_another_host_ends_all_ranks(launchers: HostLaunchers) -> None:
    leader, member = start_both(launchers, "pid hang", "pid kill:9")
    assert member.end() == -signal.SIGKILL
    assert leader.end() == 1
    leader.wait_for(r"host 1 of the trainer, at 127\.0\.0\.1, is lost: all ranks end")
    wait_until(lambda: is_gone(leader.rank_pids()[0]), "rank 0 to be gone")


@pytest.mark.extended
def test_the_exit_code_of_a_user_error_survives_the_loss_of_the_other_host(launchers: HostLaunchers) -> None:
    leader, member = start_both(launchers, f"pid exit:{USER_ERROR}", "pid hang")
    assert (leader.end(), member.end()) == (USER_ERROR, 1)


@pytest.mark.slow
def test_ranks_that_lose_host_0_write_their_stacks_and_end(launchers: HostLaunchers) -> None:
    leader, member = start_both(launchers, "pid hang", "pid hang")
    leader.wait_for_ranks(1)
    member.wait_for_ranks(1)
    leader.process.kill()
    assert member.end() == 1
    member.wait_for("host 0 of the trainer is lost: all ranks here end")
    assert "Current thread" in member.log.read_text()
    wait_until(lambda: is_gone(member.rank_pids()[0]), "its rank to be gone")


@pytest.mark.extended
@pytest.mark.parametrize("stopped", [(0,), (1,), (0, 1)])
def test_when_a_host_stops_rank_0_drains_and_all_launchers_end(
    launchers: HostLaunchers, stopped: tuple[int, ...]
) -> None:
    both = start_both(launchers, "drain", "pid hang")
    for launcher in both:
        launcher.wait_for_ranks(1)
    for host in stopped:
        both[host].process.terminate()
    assert [launcher.end() for launcher in both] == [DRAINED, DRAINED]


@pytest.mark.extended
def test_with_min_hosts_the_trainer_starts_without_a_host_until_it_comes(launchers: HostLaunchers) -> None:
    launchers.words, launchers.min_hosts = ("drain", "pid hang"), 1
    leader = launchers.start(0)
    leader.wait_for(SHRUNK)
    leader.wait_for_ranks(1)
    member = launchers.start(1)
    assert leader.end() == DRAINED
    leader = launchers.start(0)
    leader.wait_for(ALL)
    member.wait_for_ranks(1)


@pytest.mark.slow
def test_a_host_gives_its_place_back_when_host_0_stays_away(launchers: HostLaunchers) -> None:
    impatient = (
        "import sys; from millrace.runtime import host_launcher; host_launcher._YIELD_SECONDS = 2.0; "
        "host_launcher.end_as(host_launcher.main(host_launcher.Hosts.from_json(sys.argv[1]), sys.argv[2:]))"
    )
    launchers.words = ("pid hang", "pid hang")
    member = launchers.start(1, impatient)
    assert member.end() == YIELDED
    error = read_line(member.output.read_text().splitlines()[-1])
    assert isinstance(error, PlaceYielded)
    assert str(error) == "host 0 of the trainer has been away for 2 s: its job can run here"
