"""Settings of a process: it dies with its parent, leaves processor time, finds a user's modules."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LAUNCHER = "MILLRACE_LAUNCHER"
_PR_SET_PDEATHSIG = 1
"""From Linux's prctl(2); Python has no name for it."""
_LOWEST_PRIORITY = 19


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process (SIGKILL) when its parent dies, however it dies.

    `parent` is the parent's process id, if known: this process is killed at once if that parent has died already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def mark_launcher() -> None:
    """Call this in the launcher before it starts any rank."""
    os.environ[_LAUNCHER] = str(os.getpid())


def tie_to_launcher() -> int:
    """Call this first in a process that may be a rank: it then dies with its launcher. Returns its rank.

    A rank leads its own session, so a signal to its launcher's process group does not reach it. The rank is 0 if no
    launcher started the process.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None:
        return 0
    die_with_parent(int(launcher))
    return int(os.environ["RANK"])


def take_idle_time() -> None:
    """Lowers the priority of this process and of its later children for good: they get the time that others leave."""
    os.nice(_LOWEST_PRIORITY)
    # Stages have a session each. Linux may share the processor between sessions first, by the sessions' priorities.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_LOWEST_PRIORITY))


@contextmanager
def working_folder_first() -> Iterator[None]:
    """Finds modules in the working folder first, as stages do: `python -m` adds it, a console script does not."""
    path = list(sys.path)
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path[:] = path
