"""Named places at which a test may kill, stop or fail a process. Unarmed, each costs a loop over an empty tuple.

    MILLRACE_FAILPOINTS   train-0 train.mid_step 3 kill; score-0 put.after:streams/*/log/* 1 stop
                          process name                n  action        on the n-th pass
    MILLRACE_FAILPOINTS_FIRED   a folder with one file per failpoint that fired, holding the time (unix seconds). It is
                                the test's witness, and keeps the failpoint from firing again after a restart.

Actions: `kill` (SIGKILL to itself), `stop` (SIGSTOP; another process continues it), `hang` (this thread only, until
another process appends a newline to the witness file), `error` (OSError EIO).
"""

import errno
import fnmatch
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

SPECS = "MILLRACE_FAILPOINTS"
FIRED = "MILLRACE_FAILPOINTS_FIRED"

Action = Literal["kill", "stop", "hang", "error"]


@dataclass(kw_only=True)
class Failpoint:
    """One failpoint of this process, armed."""

    process: str
    """Which process it is for: a stage and its replica, `controller` or `fork_server`."""
    place: str
    """Name of the place, with `:` and a glob of store paths where the place has a path."""
    nth: int
    """Which time it fires, from 1."""
    action: Action
    passed: int = field(default=0, compare=False)

    @classmethod
    def parse(cls, spec: str) -> "Failpoint":
        """Reads `process place n action`. Raises ValueError."""
        words = spec.split()
        if len(words) != 4 or not words[2].isdigit() or words[3] not in get_args(Action):
            raise ValueError(f"{SPECS}: {spec!r}; expected process, place, number and one of {get_args(Action)}")
        return cls(process=words[0], place=words[1], nth=int(words[2]), action=cast(Action, words[3]))

    def __str__(self) -> str:
        return f"{self.process} {self.place} {self.nth} {self.action}"

    @property
    def witness(self) -> Path:
        """The file that says when it fired."""
        return Path(os.environ[FIRED]) / str(self).replace("/", "|")


_armed: tuple[Failpoint, ...] = ()


def arm(process: str) -> None:
    """Arms the failpoints that the environment names for this process. Raises ValueError for a malformed one."""
    global _armed
    specs = [spec for spec in os.environ.get(SPECS, "").split(";") if spec.strip()]
    failpoints = [Failpoint.parse(spec) for spec in specs]
    _armed = tuple(f for f in failpoints if f.process == process and not f.witness.exists())


def failpoint(name: str, path: str = "") -> None:
    """Marks a place by name, with its store path if it has one."""
    for armed in _armed:
        if _is_at(armed.place, name, path):
            armed.passed += 1
            if armed.passed == armed.nth:
                _fire(armed)


def _is_at(place: str, name: str, path: str) -> bool:
    armed_name, _, glob = place.partition(":")
    return armed_name == name and (not glob or fnmatch.fnmatchcase(path, glob))


def _fire(armed: Failpoint) -> None:
    with armed.witness.open("x") as file:
        file.write(repr(time.time()))
        file.flush()
        os.fsync(file.fileno())
    if armed.action == "error":
        raise OSError(errno.EIO, f"failpoint {armed}")
    while armed.action == "hang" and not armed.witness.read_text().endswith("\n"):
        time.sleep(0.05)
    if armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if armed.action == "stop":
        # To this thread: had another one to stop the process, this one could pass the place before it stands still.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
