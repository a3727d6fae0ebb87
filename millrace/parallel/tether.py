"""How a rank dies with the process that launched it, however that dies.

A rank leads a session of its own, so a signal to its launcher's process group does not reach it.
"""

import ctypes
import os
import signal

_LAUNCHER = "MILLRACE_LAUNCHER"
_PR_SET_PDEATHSIG = 1
"""Of prctl(2), Linux' own, which Python has no name for."""


def hold() -> None:
    """Call it in the launcher, before it starts any rank."""
    os.environ[_LAUNCHER] = str(os.getpid())


def tie() -> int:
    """Call it first where a process may be a rank; returns which one, 0 where no launcher started it.

    From here on the kernel kills a rank when its launcher dies, or did before.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None:
        return 0
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)
    return int(os.environ["RANK"])
