"""Settings of a process: it dies with its parent, keeps freed memory, leaves processor time, finds a user's modules."""

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
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 8 << 20
"""Bytes. A larger block is returned as soon as it is freed: it takes long to compute, and page faults hardly count."""
_MOST_KEPT = 256 << 20
"""Free bytes at the end of the heap. The step of a small model needs no more."""
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


def keep_freed_memory() -> None:
    """Keeps up to 256 MiB of freed memory with the process. Does nothing without glibc.

    glibc returns large blocks to the kernel when they are freed. A training step frees the same ones every time, and
    the first use of each page costs a page fault: about a tenth of the time of a step of 512 responses of ten tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


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
