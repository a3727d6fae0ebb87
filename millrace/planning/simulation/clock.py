"""How long it takes by the clock on the wall, if the stages share too few cores.

    work time    0 ──────── 1 ──────── 2 ──────── 3      the simulation's: each stage on its own
    busy            2 threads   4 threads   2 threads
    wall time    0 ──────── 1 ──────────────────── 3 ──────── 4      on two cores

Processor sharing slows all that are busy by the same factor. So the order of events is the same as without, and only
the clock on the wall runs faster.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from configs.schema import RunConfig

Times = npt.NDArray[np.float64]
Intervals = Sequence[tuple[float, float]]
"""(begin, end) of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """When the processes of a stage had nothing to do."""

    replicas: int
    threads: int
    """That each keeps busy otherwise."""
    idle: Intervals
    """Of all of them; those of one do not overlap."""

    def ends(self) -> tuple[Times, Times]:
        """Begins and ends of the times without work."""
        both = np.array(self.idle, dtype=np.float64).reshape(-1, 2)
        return both[:, 0], both[:, 1]


def stage_times(config: RunConfig, *, generate: Intervals, score: Intervals, train: Intervals) -> dict[str, StageTimes]:
    """By stage, from when its processes were idle."""
    generation, scoring = config.generation, config.scoring
    return {
        "generate": StageTimes(replicas=generation.replicas, threads=generation.threads, idle=generate),
        "score": StageTimes(replicas=scoring.replicas, threads=scoring.threads, idle=score),
        "train": StageTimes(replicas=1, threads=config.training.threads, idle=train),
    }


class WallClock:
    """Wall time by work time, both in seconds from the start. Without `cores` they are the same."""

    def __init__(self, stages: Iterable[StageTimes], cores: float | None) -> None:
        self._work: Times | None = None
        if cores is None:
            return
        times, changes = [np.zeros(1)], [np.zeros(1)]
        for stage in stages:
            changes[0] += stage.replicas * stage.threads
            for ends, sign in zip(stage.ends(), (-1, 1), strict=True):
                times.append(ends)
                changes.append(np.full(len(ends), float(sign * stage.threads)))
        work = np.concatenate(times)
        order = np.argsort(work, kind="stable")
        self._work = work[order]
        self._slower = np.maximum(1.0, np.cumsum(np.concatenate(changes)[order]) / cores)
        self._wall = np.concatenate([np.zeros(1), np.cumsum(self._slower[:-1] * np.diff(self._work))])

    def at(self, work: "Times | Sequence[float] | array[float]") -> Times:
        """The wall times of these work times."""
        times = np.asarray(work, dtype=np.float64)
        if self._work is None:
            return times
        before = np.searchsorted(self._work, times, side="right") - 1
        found: Times = self._wall[before] + (times - self._work[before]) * self._slower[before]
        return found
