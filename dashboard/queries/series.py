"""Metrics as lines with ascending x and few enough points to draw; the data of other charts.

metrics of one stage replica ─► metric ─┬──────────────────────────► thin ─► a line
of another one               ─► metric ─┴─► averaged (by version) ─► thin ─► a line
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dashboard.read.model import Columns, RunData

Floats = npt.NDArray[np.float64]

MOST_POINTS = 500
"""Per line: as many as the page has pixels for."""
_NO_FLOATS: Floats = np.empty(0)
_NO_ROWS: Columns = dict.fromkeys(("t", "incarnation", "policy_version", "value"), _NO_FLOATS)


class Line(NamedTuple):
    """Points of a chart."""

    x: Floats
    """[points] ascending."""
    y: Floats
    """[points] NaN if there is no value."""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """One heat map of counts."""

    name: str
    x: Floats
    """[columns] center of each."""
    y: Floats
    """[rows] center of each."""
    counts: npt.NDArray[np.int64]
    """[rows, columns]"""


@dataclass(frozen=True, kw_only=True)
class Track:
    """How time was spent in consecutive intervals: one row of a chart."""

    name: str
    edges: Floats
    """[intervals + 1], ascending."""
    shares: Mapping[str, Floats]
    """Kind → [intervals] share of each interval, 0 to 1; the rest was not measured."""


NO_LINE = Line(_NO_FLOATS, _NO_FLOATS)


def replicas(run: RunData, stage: str) -> list[str]:
    """Names of the stage's replicas that have metrics, `<stage>-<replica>`, by number."""
    names = [name for name in run.metrics if name.rpartition("-")[0] == stage]
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


def metric(run: RunData, replica: str, name: str) -> Columns:
    """Rows of one metric of one `<stage>-<replica>`; empty if it was never measured."""
    return run.metrics.get(replica, {}).get(name, _NO_ROWS)


def over_versions(run: RunData, replica: str, name: str) -> Line:
    """All rows of a metric over policy versions."""
    rows = metric(run, replica, name)
    return ascending(rows["policy_version"], rows["value"])


def minutes(run: RunData, t: npt.NDArray[np.float64]) -> Floats:
    """Unix seconds as minutes since the run was first started."""
    elapsed: Floats = (t - run.info.attempts[0].t_started) / 60
    return elapsed


def ascending(x: npt.ArrayLike, y: npt.ArrayLike) -> Line:
    """Points sorted by x, with a stable sort."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    order = np.argsort(xs, kind="stable")
    return Line(xs[order], ys[order])


def averaged(lines: Sequence[Line]) -> Line:
    """The mean of several lines, at every x that any of them has."""
    if not lines:
        return NO_LINE
    x, index = np.unique(np.concatenate([line.x for line in lines]), return_inverse=True)
    y = np.concatenate([line.y for line in lines])
    return Line(x, np.bincount(index, y, len(x)) / np.bincount(index, minlength=len(x)))


def thin(line: Line, *, largest: bool = False) -> Line:
    """At most 500 points, each the mean of equally many neighbours, or their `largest`; the last of fewer perhaps."""
    size = -(-len(line.x) // MOST_POINTS)
    if size <= 1:
        return line
    starts = np.arange(0, len(line.x), size)
    counts = np.diff(starts, append=len(line.x))
    y = np.maximum.reduceat(line.y, starts) if largest else np.add.reduceat(line.y, starts) / counts
    return Line(np.add.reduceat(line.x, starts) / counts, y)
