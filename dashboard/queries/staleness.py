"""Staleness of the trained trajectories, its sources, and the cost of the bound.

    consumed ─► trained rows ─► at most 500 bins of whole steps ─► one value per bin: mean, largest, share
             └► all rows     ─► by outcome

Staleness is measured in policy versions. The x of a line is the version that a step made. Means are over trajectories.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dashboard.queries.series import MOST_POINTS, NO_LINE, TRAINER, ChartLine, Floats, Heat, over_versions, thin
from dashboard.read.model import Columns, RunData
from millrace.rollouts.staleness import TOKENS_OF_STALENESS

MOST_CELLS = 120
"""Cells per side of a heat map."""
MOST_SPANS = 5
"""Trajectories sampled by at least this many versions are counted together."""
_RECENT_SHARE = 0.1


class _Bins:
    """Trained rows in at most 500 bins of whole steps. Rows of a step are adjacent, and steps are ascending."""

    def __init__(self, rows: Columns) -> None:
        versions = rows["policy_version"]
        self.rows = rows
        steps = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
        size = max(1, -(-len(steps) // MOST_POINTS))
        first = np.arange(0, len(steps), size)
        self.starts = steps[first]
        self.counts = np.diff(self.starts, append=len(versions))
        num_steps = np.diff(first, append=len(steps))
        self.versions: Floats = np.add.reduceat(versions[steps], first) / num_steps

    def mean(self, column: str) -> ChartLine:
        return ChartLine(self.versions, np.add.reduceat(self.rows[column], self.starts, dtype=np.int64) / self.counts)

    def count(self, values: npt.NDArray[Any], size: int, weights: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Counts each value below `size` in each bin, or sums its `weights`: [bins, size]."""
        cells = np.repeat(np.arange(len(self.starts)), self.counts) * size + values
        return np.bincount(cells, weights, len(self.starts) * size).reshape(-1, size)


def over_time(run: RunData) -> tuple[ChartLine, ChartLine]:
    """Returns the mean and the largest staleness of the groups of each step."""
    mean, largest = (over_versions(run, TRAINER, f"staleness_{name}") for name in ("mean", "max"))
    return thin(mean), thin(largest, largest=True)


def bound(run: RunData) -> ChartLine:
    """Returns the bound in force at each step; empty for a replay, which has none."""
    return thin(over_versions(run, TRAINER, "max_staleness"), largest=True)


def split(run: RunData) -> tuple[ChartLine, ChartLine]:
    """Returns the mean staleness from sampling and from waiting in queues; their sum is the mean staleness."""
    bins = _bins(run, "staleness", "staleness_in_flight")
    if bins is None:
        return NO_LINE, NO_LINE
    in_flight = bins.mean("staleness_in_flight")
    return in_flight, ChartLine(in_flight.x, bins.mean("staleness").y - in_flight.y)


def distribution(run: RunData) -> tuple[ChartLine, ChartLine] | None:
    """Share of the trained trajectories by staleness, 0, 1, 2 …; None before the first step.

    Returns one line for the newest tenth, including the last step, and one for all trajectories.
    """
    rows = _trained(run, "staleness")
    versions, lags = rows["policy_version"], rows["staleness"]
    if not len(lags):
        return None
    last_step = int(np.searchsorted(versions, versions[-1]))
    recent = lags[min(last_step, len(lags) - int(np.ceil(len(lags) * _RECENT_SHARE))) :]
    whole = np.bincount(lags)
    staleness = np.arange(len(whole), dtype=np.float64)
    newest = np.bincount(recent, minlength=len(whole)) / len(recent)
    return ChartLine(staleness, newest), ChartLine(staleness, whole / len(lags))


def token_distribution(run: RunData) -> tuple[ChartLine, ChartLine] | None:
    """Share of the trained tokens by staleness, each by the version that sampled it; None if not recorded.

    Returns one line for the newest tenth of the steps, and one for all.
    """
    rows = {
        int(name.removeprefix(TOKENS_OF_STALENESS)): columns
        for name, columns in run.metrics.get(TRAINER, {}).items()
        if name.startswith(TOKENS_OF_STALENESS)
    }
    if not rows:
        return None
    last = max(int(columns["policy_version"].max()) for columns in rows.values())
    first = last - int(np.ceil(last * _RECENT_SHARE))
    whole, recent = np.zeros(max(rows) + 1), np.zeros(max(rows) + 1)
    for value, columns in rows.items():
        whole[value] = columns["value"].sum()
        recent[value] = columns["value"][columns["policy_version"] > first].sum()
    staleness = np.arange(len(whole), dtype=np.float64)
    return ChartLine(staleness, recent / recent.sum()), ChartLine(staleness, whole / whole.sum())


def pairs(run: RunData) -> Heat | None:
    """Counts the trajectories trained at each of the newest 120 versions (x) by staleness (y).

    If the staleness exceeds 120, several values share a cell. None before the first step.
    """
    rows = _trained(run, "staleness")
    versions, staleness = rows["policy_version"], rows["staleness"]
    if not len(versions):
        return None
    first = int(np.searchsorted(versions, versions[-1] - MOST_CELLS + 1))
    versions, staleness = versions[first:], staleness[first:]
    left = int(versions[0])
    size = -(-(int(staleness.max()) + 1) // MOST_CELLS)
    row, column = staleness // size, versions - left
    shape = int(row.max()) + 1, int(column[-1]) + 1
    counts = np.bincount(row * shape[1] + column, minlength=shape[0] * shape[1]).reshape(shape)
    return Heat(
        name=run.info.run_id,
        x=left + np.arange(shape[1], dtype=np.float64),
        y=(size - 1) / 2 + size * np.arange(shape[0], dtype=np.float64),
        counts=counts,
    )


def by_generator(run: RunData) -> Mapping[int, ChartLine]:
    """Generator → mean staleness of its trajectories."""
    bins = _bins(run, "staleness", "generator")
    if bins is None:
        return {}
    generators = bins.rows["generator"]
    size = int(generators.max()) + 1
    counts, sums = bins.count(generators, size), bins.count(generators, size, bins.rows["staleness"])
    return {
        generator: ChartLine(bins.versions[made], sums[made, generator] / counts[made, generator])
        for generator in range(size)
        if (made := counts[:, generator] > 0).any()
    }


def spans(run: RunData) -> Mapping[int, ChartLine]:
    """Number of versions that sampled a trajectory, 1 to 5 or more → share of the trajectories."""
    bins = _bins(run, "min_policy_version", "max_policy_version")
    if bins is None:
        return {}
    more = np.minimum(bins.rows["max_policy_version"] - bins.rows["min_policy_version"], MOST_SPANS - 1)
    shares = bins.count(more, MOST_SPANS) / bins.counts[:, np.newaxis]
    return {number + 1: ChartLine(bins.versions, shares[:, number]) for number in range(MOST_SPANS)}


def mean_span(run: RunData) -> ChartLine:
    """Returns the mean number of versions that sampled a trajectory."""
    bins = _bins(run, "min_policy_version", "max_policy_version")
    if bins is None:
        return NO_LINE
    newest, oldest = bins.mean("max_policy_version"), bins.mean("min_policy_version")
    return ChartLine(newest.x, newest.y - oldest.y + 1)


def outcomes(run: RunData) -> Mapping[str, tuple[int, int, float, float]]:
    """Outcome → trajectories, response tokens, mean length and mean of the known rewards; NaN without any.

    The trained trajectories are first, then those of each drop_reason that occurred.
    """
    codes, tokens, rewards = (run.consumed[name] for name in ("outcome", "tokens", "reward"))
    amounts = {}
    for code, name in enumerate(run.consumed.outcomes):
        chosen = codes == code
        count, length, finite = int(np.count_nonzero(chosen)), int(tokens[chosen].sum()), rewards[chosen]
        finite = finite[~np.isnan(finite)]
        if code == 0 or count:
            reward = float(finite.mean()) if len(finite) else np.nan
            amounts[name] = (count, length, length / count if count else np.nan, reward)
    return amounts


def _bins(run: RunData, *columns: str) -> _Bins | None:
    """Bins the trained rows; None before the first step."""
    rows = _trained(run, *columns)
    return _Bins(rows) if len(rows["policy_version"]) else None


def _trained(run: RunData, *columns: str) -> Columns:
    """Returns `columns` and policy_version of the trained rows."""
    names, trained = ("policy_version", *columns), run.trained
    if trained.all():
        return {name: run.consumed[name] for name in names}
    return {name: run.consumed[name][trained] for name in names}
