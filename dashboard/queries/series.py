"""Metrics and evaluation results as lines with ascending x and at most 500 points; data types of other charts.

metrics of one stage replica ─► metric ─┬──────────────────────────► thin ─► a line
of another replica           ─► metric ─┴─► averaged (by version) ─► thin ─► a line
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dashboard.read.model import Columns, RunData
from millrace.runtime.metrics import RECENT_STEPS

TRAINER = "train-0"
RATIO_QUANTILES = ("p05", "p50", "p95", "max")
"""Quantiles of the importance ratio π/μ over a step's tokens, as the trainer names them."""
Floats = npt.NDArray[np.float64]

MOST_POINTS = 500
"""Points per line, about as many as a chart has pixels."""
_NO_FLOATS: Floats = np.empty(0)
_NO_ROWS: Columns = dict.fromkeys(("t", "incarnation", "policy_version", "value"), _NO_FLOATS)


class ChartLine(NamedTuple):
    """Points of a chart."""

    x: Floats
    """[points] ascending."""
    y: Floats
    """[points] NaN for missing values."""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """One heat map of counts."""

    name: str
    x: Floats
    """[columns] centers."""
    y: Floats
    """[rows] centers."""
    counts: npt.NDArray[np.int64]
    """[rows, columns]"""


@dataclass(frozen=True, kw_only=True)
class Track:
    """Use of time in consecutive intervals: one row of a chart."""

    name: str
    edges: Floats
    """[intervals + 1], ascending."""
    shares: Mapping[str, Floats]
    """Kind of time → [intervals] share of each interval, 0 to 1; the remainder was not measured."""


NO_LINE = ChartLine(_NO_FLOATS, _NO_FLOATS)


def replicas(run: RunData, stage: str) -> list[str]:
    """Names of the stage's replicas with metrics, `<stage>-<replica>`, by number."""
    names = [name for name in run.metrics if name.rpartition("-")[0] == stage]
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


def metric(run: RunData, replica: str, name: str) -> Columns:
    """Rows of a metric of `<stage>-<replica>`; empty if it was never recorded."""
    return run.metrics.get(replica, {}).get(name, _NO_ROWS)


def over_versions(run: RunData, replica: str, name: str) -> ChartLine:
    """Returns all values of a metric over policy versions."""
    rows = metric(run, replica, name)
    return ascending(rows["policy_version"], rows["value"])


def minutes(run: RunData, t: npt.NDArray[np.float64]) -> Floats:
    """Converts unix seconds to minutes since the run's first start."""
    elapsed: Floats = (t - run.info.attempts[0].t_started) / 60
    return elapsed


def apart(run: RunData, line: ChartLine) -> ChartLine:
    """Breaks a line over minutes where the run was resumed, because nothing ran before."""
    at = resumes(run, line.x)
    return ChartLine(np.insert(line.x, at, line.x[at]), np.insert(line.y, at, np.nan))


def resumes(run: RunData, x: Floats) -> npt.NDArray[np.int64]:
    """Returns the indices of the first points, at `x` minutes, of later attempts."""
    at = np.searchsorted(x, minutes(run, np.array([attempt.t_started for attempt in run.info.attempts[1:]])))
    return np.unique(at[(at > 0) & (at < len(x))])


def clock(run: RunData) -> ChartLine:
    """Policy version (x) → minutes from the run's start until it was made (y)."""
    rows = metric(run, TRAINER, "reward_mean")
    return ChartLine(rows["policy_version"].astype(np.float64), minutes(run, rows["t"]))


def ascending(x: npt.ArrayLike, y: npt.ArrayLike) -> ChartLine:
    """Sorts the points by x; the sort is stable."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    order = np.argsort(xs, kind="stable")
    return ChartLine(xs[order], ys[order])


def averaged(lines: Sequence[ChartLine]) -> ChartLine:
    """Returns the mean of the lines at every x that occurs in any of them."""
    if not lines:
        return NO_LINE
    x, index = np.unique(np.concatenate([line.x for line in lines]), return_inverse=True)
    y = np.concatenate([line.y for line in lines])
    return ChartLine(x, np.bincount(index, y, len(x)) / np.bincount(index, minlength=len(x)))


def thin(line: ChartLine, *, largest: bool = False) -> ChartLine:
    """Reduces the line to at most 500 points, each the mean of adjacent points, or with `largest` their maximum."""
    size = -(-len(line.x) // MOST_POINTS)
    if size <= 1:
        return line
    starts = np.arange(0, len(line.x), size)
    counts = np.diff(starts, append=len(line.x))
    y = np.maximum.reduceat(line.y, starts) if largest else np.add.reduceat(line.y, starts) / counts
    return ChartLine(np.add.reduceat(line.x, starts) / counts, y)


def mean_of_last(line: ChartLine, width: float) -> ChartLine:
    """Returns at each x the mean of the finite values in (x - width, x]; NaN without any."""
    finite = np.isfinite(line.y)
    sums = np.cumsum(np.append(0.0, np.where(finite, line.y, 0.0)))
    counts = np.cumsum(np.append(0, finite))
    starts = np.searchsorted(line.x, line.x - width, side="right")
    ends = np.arange(1, len(line.x) + 1)
    number = counts[ends] - counts[starts]
    y = np.divide(sums[ends] - sums[starts], number, out=np.full(len(line.x), np.nan), where=number > 0)
    return ChartLine(line.x, y)


def measured(run: RunData, name: str) -> ChartLine:
    """Returns one of the trainer's metrics. Thinning averages neighbours, but keeps the maxima of `…_max`."""
    return thin(over_versions(run, TRAINER, name), largest=name.endswith("_max"))


def recent(run: RunData, name: str) -> float:
    """Returns the mean of one of the trainer's metrics over the last ten steps that have it; NaN without any."""
    values = metric(run, TRAINER, name)["value"][-RECENT_STEPS:]
    return float(values.mean()) if len(values) else np.nan


def is_measured(run: RunData, name: str) -> bool:
    """Whether the trainer has recorded the metric."""
    return len(metric(run, TRAINER, name)["value"]) > 0


def accuracy(run: RunData) -> ChartLine:
    """Held-out accuracy of each evaluated version."""
    return _of(run.evaluations, "accuracy")


def accuracy_interval(run: RunData) -> tuple[ChartLine, ChartLine]:
    """Lower and upper ends of the accuracy's 95 % interval; NaN if unknown."""
    return _of(run.evaluations, "accuracy_low"), _of(run.evaluations, "accuracy_high")


def further_accuracies(run: RunData) -> dict[str, ChartLine]:
    """Name of a further evaluation set → accuracy."""
    return {name: _of(columns, "accuracy") for name, columns in run.evaluation_sets.items()}


def _of(evaluations: Columns, name: str) -> ChartLine:
    return thin(ascending(evaluations["policy_version"], evaluations[name]))
