"""The cause of a stage process's death for people: exit code or signal, out of memory, the last lines of its log."""

import signal
from collections import deque
from collections.abc import Sequence
from pathlib import Path

_LAST_LINES = 15
_READ_SECONDS, _READINGS_KEPT = 5.0, 7
"""Half a minute: a process of hundreds of gigabytes takes that long to end after the kernel counts its kill."""


def oom_counters() -> list[Path]:
    """Files in which the kernel counts its out-of-memory kills, the most specific first.

    First the control group of this process and its stages (version 2, version 1), then the whole machine, on which
    other users' processes may have been killed.
    """
    files = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            files.append(Path("/sys/fs/cgroup", group.lstrip("/"), "memory.events"))
        elif "memory" in controllers.split(","):
            files.append(Path("/sys/fs/cgroup/memory", group.lstrip("/"), "memory.oom_control"))
    return [*files, Path("/proc/vmstat")]


class OomKills:
    """Detects whether the kernel killed a process in the last half minute because memory ran out.

    Reads the first of `counters` that has a line `oom_kill`; without one, no kill is detected.
    """

    def __init__(self, counters: Sequence[Path], now: float) -> None:
        self._counter = next((file for file in counters if _oom_kills(file) is not None), None)
        self._read_at = now
        self._readings = deque([self._count()], maxlen=_READINGS_KEPT)

    def look(self, now: float) -> None:
        """Reads the counter from time to time; call it often. `now` is in seconds of any clock."""
        if now - self._read_at >= _READ_SECONDS:
            self._read_at = now
            self._readings.append(self._count())

    def happened(self) -> bool:
        """Whether there was a kill up to now."""
        return self._count() > self._readings[0]

    def _count(self) -> int:
        return 0 if self._counter is None else _oom_kills(self._counter) or 0


def cause(code: int, *, out_of_memory: bool) -> str:
    """Describes an exit code, which is negative for a signal. `out_of_memory`: see `OomKills`."""
    if code == -signal.SIGKILL and out_of_memory:
        return "was killed by the kernel, out of memory"
    death = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    # The kernel may have killed one of its children, such as a worker of vLLM.
    return f"{death}, just after the kernel killed a process, out of memory" if out_of_memory else death


def with_last_lines(sentence: str, log: Path) -> str:
    """The sentence followed by the end of the log."""
    return f"{sentence}\nthe end of {log}:\n{last_lines(log.read_bytes())}"


def last_lines(log: bytes) -> str:
    return "\n".join(log.decode(errors="replace").splitlines()[-_LAST_LINES:])


def _oom_kills(file: Path) -> int | None:
    counts = dict(line.split(" ", 1) for line in _read(file).splitlines() if " " in line)
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
