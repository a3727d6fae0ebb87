"""Processes that the kernel kills when their parent dies, however it dies.

A rank of the trainer leads its own session, so a signal to its launcher's process group does not reach it.
"""

import ctypes
import os
import signal

_LAUNCHER = "MILLRACE_LAUNCHER"
_PR_SET_PDEATHSIG = 1
"""From Linux's prctl(2); Python has no name for it."""


def die_with_parent(parent: int | None = None) -> None:
    """From now on the kernel kills this process (SIGKILL) when its parent dies.

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

    The rank is 0 if no launcher started the process.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None:
        return 0
    die_with_parent(int(launcher))
    return int(os.environ["RANK"])
