"""CPU time and memory of this process and its descendants, such as an engine's workers, from Linux's /proc.

/proc/<pid>/task/*/children ─► descendants ─► stat: CPU ticks, also those of children that have ended ─► cores in use
                                           └► statm: resident pages ───────────────────────────────────► bytes
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

USAGE = "usage/"
"""Prefix of the metrics of what a stage uses of its machine."""
CPU_CORES = f"{USAGE}cpu_cores"
MEMORY_BYTES = f"{USAGE}memory_bytes"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FIRST_TIME = 11
"""Index of utime among the fields of stat after the process's name; stime, cutime and cstime follow."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What all processes together use."""

    cpu_cores: float
    """CPU seconds per second since the last look."""
    memory_bytes: int
    """Resident; memory that processes share counts for each."""


class ProcessTree:
    """This process and its descendants. `proc` is where Linux shows processes."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last: tuple[float, float] | None = None
        """When it was looked at, and the CPU seconds by then."""
        self.look()

    def look(self) -> Usage | None:
        """Returns the use since the last call; None at the first, and where there is no /proc."""
        pids = [os.getpid(), *self._descendants(os.getpid())]
        alive = [process for pid in pids if (process := self._read(pid)) is not None]
        if not alive:
            return None
        now, cpu = time.monotonic(), sum(seconds for seconds, _ in alive)
        last, self._last = self._last, (now, cpu)
        if last is None or now <= last[0]:
            return None
        # A descendant that ended as an orphan takes its time along.
        used = max(0.0, cpu - last[1])
        return Usage(cpu_cores=used / (now - last[0]), memory_bytes=sum(memory for _, memory in alive))

    def _descendants(self, pid: int) -> Iterator[int]:
        for file in self._proc.glob(f"{pid}/task/*/children"):
            try:
                children = file.read_text().split()
            except OSError:
                # The thread has ended.
                continue
            for child in map(int, children):
                yield child
                yield from self._descendants(child)

    def _read(self, pid: int) -> tuple[float, int] | None:
        """CPU seconds and resident bytes; None if the process has ended."""
        try:
            stat = (self._proc / str(pid) / "stat").read_text()
            resident = (self._proc / str(pid) / "statm").read_text().split()[1]
        except OSError:
            return None
        # The name is in parentheses and may hold anything.
        times = stat.rpartition(")")[2].split()[_FIRST_TIME : _FIRST_TIME + 4]
        return sum(map(int, times)) / _TICKS_PER_SECOND, int(resident) * _PAGE_BYTES
