"""The launchers of a trainer's hosts, all on this machine and on loopback, with fake stages as ranks."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from support.campaigns.campaigns import wait_until
from support.stages import fake_stage

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
