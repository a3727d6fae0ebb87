"""Measurements as lines: x ascending, and few enough points to draw.

metrics of one stage replica ─► metric ─┬──────────────────────────► thin ─► a line
of another one               ─► metric ─┴─► averaged (by version) ─► thin ─► a line
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dashboard.data import Columns, RunData

Floats = npt.NDArray[np.float64]

MOST_POINTS = 500
"""Of a line: more than the page has pixels for."""
_NO_FLOATS: Floats = np.empty(0)
_NO_ROWS: Columns = dict.fromkeys(("t", "incarnation", "policy_version", "value"), _NO_FLOATS)


class Line(NamedTuple):
    """Points of a chart."""

    x: Floats
    """[points] ascending."""
    y: Floats
    """[points] NaN where there is no value."""


NO_LINE = Line(_NO_FLOATS, _NO_FLOATS)


def replicas(run: RunData, stage: str) -> list[str]:
    """Names of the stage's replicas that measured anything, `<stage>-<replica>`, by number."""
    found = [name for name in run.metrics if name.rpartition("-")[0] == stage]
    return sorted(found, key=lambda name: int(name.rpartition("-")[2]))


def metric(run: RunData, replica: str, name: str) -> Columns:
    """Rows of one measurement of one `<stage>-<replica>`; of no length where it was never made."""
    return run.metrics.get(replica, {}).get(name, _NO_ROWS)


def over_versions(run: RunData, replica: str, name: str) -> Line:
    """A measurement over policy versions, whole."""
    rows = metric(run, replica, name)
    return ascending(rows["policy_version"], rows["value"])


def minutes(run: RunData, t: npt.NDArray[np.float64]) -> Floats:
    """Unix seconds as minutes since the run was first started."""
    found: Floats = (t - run.facts.attempts[0].t_started) / 60
    return found


def ascending(x: npt.ArrayLike, y: npt.ArrayLike) -> Line:
    """Points put in the order of their x; those of one x keep theirs."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    order = np.argsort(xs, kind="stable")
    return Line(xs[order], ys[order])


def averaged(lines: Sequence[Line]) -> Line:
    """One line of several: at each x that any of them has, the mean of their values there."""
    if not lines:
        return NO_LINE
    x, place = np.unique(np.concatenate([line.x for line in lines]), return_inverse=True)
    y = np.concatenate([line.y for line in lines])
    return Line(x, np.bincount(place, y, len(x)) / np.bincount(place, minlength=len(x)))


def thin(line: Line, *, largest: bool = False) -> Line:
    """At most 500 points: each the mean of as many neighbours, or their `largest`; the last one perhaps of fewer."""
    size = -(-len(line.x) // MOST_POINTS)
    if size <= 1:
        return line
    starts = np.arange(0, len(line.x), size)
    counts = np.diff(starts, append=len(line.x))
    y = np.maximum.reduceat(line.y, starts) if largest else np.add.reduceat(line.y, starts) / counts
    return Line(np.add.reduceat(line.x, starts) / counts, y)
