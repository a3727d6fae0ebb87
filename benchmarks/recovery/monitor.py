"""Recovery times of stages: from a kill until the next process of the stage was ready."""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from storage.progress import read_progress
from storage.stores.factory import open_store


@dataclass(frozen=True, kw_only=True)
class StageStart:
    """The start of one stage process, read from its status record. Times are in Unix seconds."""

    stage: str
    t_process: float
    """When the process started."""
    t_main: float
    """When its imports were done."""
    t_ready: float
    load_seconds: float
    """Time to load the model."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The recovery of one killed stage, in seconds."""

    stage: str
    total: float
    """From the kill until the next process was ready."""
    imports: float
    """Part of `total`: importing torch and the rest."""
    load: float
    """Part of `total`: loading the model."""

    @property
    def own(self) -> float:
        """The rest: noticing the death, starting a process, reading the streams."""
        return self.total - self.imports - self.load


class RecoveryMonitor:
    """Monitors the status records of a run while its `with` block lasts."""

    def __init__(self, run_url: str) -> None:
        self._store = open_store(run_url)
        self._starts: dict[tuple[str, int], StageStart] = {}
        self._process_times: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._monitor, daemon=True)

    def __enter__(self) -> "RecoveryMonitor":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def recoveries(self, killed: list[tuple[str, float]]) -> list[Recovery]:
        """One recovery per (stage, time of its kill), unless the next process was killed before it was ready."""
        found = []
        for stage, t_killed in killed:
            later = [start for start in self._starts.values() if start.stage == stage and start.t_process > t_killed]
            if not later:
                continue
            start = min(later, key=lambda start: start.t_process)
            deaths = [t for name, t in killed if name == stage and t > t_killed]
            if deaths and min(deaths) < start.t_ready:
                continue
            found.append(
                Recovery(
                    stage=stage,
                    total=start.t_ready - t_killed,
                    imports=start.t_main - start.t_process,
                    load=start.load_seconds,
                )
            )
        return found

    def _monitor(self) -> None:
        while not self._over.is_set():
            for name, status in read_progress(self._store).items():
                self._record(name, status)
            time.sleep(0.05)

    def _record(self, name: str, status: dict[str, object]) -> None:
        pid = status.get("pid")
        if not isinstance(pid, int) or not status.get("t_ready"):
            return
        if pid not in self._process_times:
            try:
                self._process_times[pid] = time.time() - age_seconds(pid)
            except FileNotFoundError:
                return
        t_main, t_ready, load_seconds = (status[key] for key in ("t_main", "t_ready", "load_seconds"))
        assert isinstance(t_main, float)
        assert isinstance(t_ready, float)
        assert isinstance(load_seconds, float)
        self._starts[name, pid] = StageStart(
            stage=name, t_process=self._process_times[pid], t_main=t_main, t_ready=t_ready, load_seconds=load_seconds
        )


def age_seconds(pid: int) -> float:
    """The age of a process, independent of changes to the wall clock since this machine was started."""
    started_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
