"""Processes that a test kills, stops or fails at a named place, and the proof that it happened there.

with Failpoints(folder, "writer put.mid:s/log/* 3 kill") as armed ─► environment ─► the process ─► the place
                              ▲                                                                       │
                              └───────── fired(), wait_until_stopped() ◄── witness file, signal ◄─────┘
"""

import os
import signal
import subprocess
from pathlib import Path

from storage.failpoints import FIRED, SPECS, Failpoint


class Failpoints:
    """Failpoints for the processes that are started with its environment; `folder` holds their witnesses.

    Each spec is `process place n action`, as `storage.failpoints` reads it. Raises ValueError for a malformed one.
    """

    def __init__(self, folder: Path, *specs: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.armed = [Failpoint.parse(spec) for spec in specs]

    def environment(self) -> dict[str, str]:
        """This process's environment, and the failpoints."""
        specs = ";".join(str(failpoint) for failpoint in self.armed)
        return {**os.environ, SPECS: specs, FIRED: str(self.folder)}

    def fired(self) -> dict[str, float]:
        """`{spec: when}` of those that fired, unix seconds."""
        return {file.name.replace("|", "/"): float(file.read_text()) for file in sorted(self.folder.iterdir())}

    def has_fired(self, spec: str) -> bool:
        """Whether the failpoint of this spec has fired; for a test that waits for it."""
        return (self.folder / spec.replace("/", "|")).exists()

    def release(self, spec: str) -> None:
        """Ends the `hang` of this spec."""
        with (self.folder / spec.replace("/", "|")).open("a") as witness:
            witness.write("\n")

    def missed(self) -> list[str]:
        """The specs of those that did not fire: an empty list is the test's witness."""
        fired = self.fired()
        return [str(failpoint) for failpoint in self.armed if str(failpoint) not in fired]


def wait_until_stopped(process: subprocess.Popen[str]) -> bool:
    """Wait for a child of ours to be stopped (True) or to end (False); it stays a child that can be waited for."""
    status = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)


def go_on(process: subprocess.Popen[str]) -> None:
    """Continue a stopped process."""
    process.send_signal(signal.SIGCONT)
