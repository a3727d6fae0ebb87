"""How long stages took to come back: from a kill to the moment their successor was ready."""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from storage.factory import open_store
from storage.progress import read_progress


@dataclass(frozen=True, kw_only=True)
class Life:
    """One process of a stage, as its signs of life told it. Unix seconds and seconds."""

    stage: str
    t_process: float
    """When the process began."""
    t_main: float
    """When its code was imported."""
    t_ready: float
    load_seconds: float
    """Of the model."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One stage that was killed and came back, seconds."""

    stage: str
    total: float
    """From the kill to its successor being ready."""
    imports: float
    """Of which the successor imported torch and the rest,"""
    load: float
    """and loaded the model."""

    @property
    def own(self) -> float:
        """What is left: noticing, starting a process, reading the streams back."""
        return self.total - self.imports - self.load


class LifeWatch:
    """Watches the signs of life of a run while its `with` block lasts."""

    def __init__(self, run_url: str) -> None:
        self._store = open_store(run_url)
        self._lives: dict[tuple[str, int], Life] = {}
        self._began: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "LifeWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def recoveries(self, killed: list[tuple[str, float]]) -> list[Recovery]:
        """Of each (stage, when it was killed) whose successor became ready before it was killed itself."""
        found = []
        for stage, t_killed in killed:
            later = [life for life in self._lives.values() if life.stage == stage and life.t_process > t_killed]
            if not later:
                continue
            life = min(later, key=lambda life: life.t_process)
            deaths = [t for name, t in killed if name == stage and t > t_killed]
            if deaths and min(deaths) < life.t_ready:
                continue
            found.append(
                Recovery(
                    stage=stage,
                    total=life.t_ready - t_killed,
                    imports=life.t_main - life.t_process,
                    load=life.load_seconds,
                )
            )
        return found

    def _watch(self) -> None:
        while not self._over.is_set():
            for name, life in read_progress(self._store).items():
                self._look_at(name, life)
            time.sleep(0.05)

    def _look_at(self, name: str, life: dict[str, object]) -> None:
        pid = life.get("pid")
        if not isinstance(pid, int) or not life.get("t_ready"):
            return
        if pid not in self._began:
            try:
                self._began[pid] = time.time() - age_seconds(pid)
            except FileNotFoundError:
                return
        t_main, t_ready, load_seconds = (life[key] for key in ("t_main", "t_ready", "load_seconds"))
        assert isinstance(t_main, float)
        assert isinstance(t_ready, float)
        assert isinstance(load_seconds, float)
        self._lives[name, pid] = Life(
            stage=name, t_process=self._began[pid], t_main=t_main, t_ready=t_ready, load_seconds=load_seconds
        )


def age_seconds(pid: int) -> float:
    """How long a process has been there, whatever became of the wall clock since this machine was started."""
    started_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
