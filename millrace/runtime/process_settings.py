"""Settings of a stage process: it keeps freed memory, or leaves processor time to others."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 8 << 20
"""Bytes. A larger block is returned as soon as it is freed: it takes long to compute, and page faults hardly count."""
_MOST_KEPT = 256 << 20
"""Free bytes at the end of the heap. The step of a small model needs no more."""
_LOWEST = 19
"""Priority of a process that runs only while no other wants the processor."""


def keep_freed_memory() -> None:
    """From now on, up to 256 MiB of freed memory stay with the process. Does nothing without glibc.

    glibc returns large blocks to the kernel when they are freed. A training step frees the same ones every time, and
    the first use of each page costs a page fault: about a tenth of the time of a step of 512 responses of ten tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def take_idle_time() -> None:
    """Lowers this process's priority, and that of all it starts later, for good: it gets what the others leave."""
    os.nice(_LOWEST)
    # Stages have a session each. Linux may share the processor between sessions first, and each session has a priority
    # of its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_LOWEST))
