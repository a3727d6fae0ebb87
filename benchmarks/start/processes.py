"""Samples a process and all its descendants: when each started, the processor time it has used, its memory.

psutil's creation times may be off by up to a second, because the kernel tells the time of its start in whole seconds.
Here they are put right by the clock that counts from that start.
"""

import threading
import time
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

_SAMPLE_SECONDS = 0.05


@dataclass
class Sampled:
    """What was seen of one process."""

    pid: int
    command: list[str]
    started: float
    """Unix seconds, to 0.01 s."""
    times: list[float] = field(default_factory=list)
    """Of each sample, unix seconds."""
    cpu_seconds: list[float] = field(default_factory=list)
    """User and system time of the process alone, at each sample."""

    @property
    def last_seen(self) -> float:
        """Unix seconds."""
        return self.times[-1]

    def cpu_until(self, t: float) -> float:
        """Processor seconds up to the last sample not after `t` (unix seconds); 0 before the first."""
        number = bisect_right(self.times, t)
        return self.cpu_seconds[number - 1] if number else 0.0


class ProcessTree:
    """Samples the tree of process `pid` in a thread while its `with` block lasts."""

    def __init__(self, pid: int) -> None:
        self.found: dict[int, Sampled] = {}
        self._root = psutil.Process(pid)
        self._boot_error = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - psutil.boot_time()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process tree", daemon=True)

    def __enter__(self) -> "ProcessTree":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def pss_bytes(self) -> dict[int, int]:
        """Proportional set size of each living process, by process id: a page that n processes share counts 1/n."""
        sizes = {}
        for process in self._living():
            with suppress(psutil.Error):
                sizes[process.pid] = process.memory_full_info().pss
        return sizes

    def _run(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            for process in self._living():
                # It may end at any time.
                with suppress(psutil.Error):
                    self._sample(process)

    def _living(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def _sample(self, process: psutil.Process) -> None:
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            cpu, command = process.cpu_times(), process.cmdline()
            sampled = self.found.get(process.pid)
            if sampled is None:
                started = process.create_time() + self._boot_error
                sampled = self.found[process.pid] = Sampled(process.pid, command, started)
        # Between fork and exec a process still has its parent's command line.
        sampled.command = command
        sampled.times.append(time.time())
        sampled.cpu_seconds.append(cpu.user + cpu.system)
