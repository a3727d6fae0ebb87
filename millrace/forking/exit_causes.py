"""The cause of a stage process's death for people: exit code or signal, out of memory, the last lines of its log."""

import re
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

_LAST_LINES = 15
_READ_SECONDS, _READINGS_KEPT = 5.0, 7
"""Half a minute: a process of hundreds of gigabytes takes that long to end after the kernel counts its kill."""


def count_oom_kills() -> int:
    """The kernel's count of out-of-memory kills: in the control group of this process and its stages, if it has one.

    Otherwise on the whole machine, where it may have killed other users' processes.
    """
    with suppress(OSError):
        group = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        for counter in (Path("/sys/fs/cgroup", group, "memory.events"), Path("/proc/vmstat")):
            if counter.exists() and (match := re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)):
                return int(match[1])
    return 0


class OomKills:
    """Detects whether the kernel killed a process in the last half minute because memory ran out."""

    def __init__(self, now: float, count: Callable[[], int] = count_oom_kills) -> None:
        self._count = count
        self._read_at = now
        self._readings = deque([count()], maxlen=_READINGS_KEPT)

    def look(self, now: float) -> None:
        """Reads the count from time to time; call it often. `now` is in seconds of any clock."""
        if now - self._read_at >= _READ_SECONDS:
            self._read_at = now
            self._readings.append(self._count())

    def happened(self) -> bool:
        """Whether there was a kill up to now."""
        return self._count() > self._readings[0]


def cause(code: int, *, out_of_memory: bool) -> str:
    """Describes an exit code, which is negative for a signal. `out_of_memory`: see `OomKills`."""
    if code == -signal.SIGKILL and out_of_memory:
        return "was killed by the kernel, out of memory"
    death = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    # The kernel may have killed one of its children, such as a worker of vLLM.
    return f"{death}, just after the kernel killed a process, out of memory" if out_of_memory else death


def last_lines(log: IO[bytes]) -> str:
    """The end of an open log."""
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
