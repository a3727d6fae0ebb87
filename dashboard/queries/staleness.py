"""How old the trained trajectories were, where that came from, and what the bound cost.

    consumed ─► trained rows ─► stretches of whole steps, at most 500 ─► a value each: mean, largest, share
             └► all rows     ─► by outcome

Staleness is in policy versions; lines are over the policy version that a step made. A mean is over trajectories.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dashboard.data import Columns, RunData
from dashboard.queries.series import MOST_POINTS, NO_LINE, Floats, Line

MOST_CELLS = 120
"""Of a heat map, each way."""
MOST_SPANS = 5
"""So many versions or more in one trajectory are counted together."""
_RECENT_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How many of the trained trajectories had which staleness."""

    staleness: npt.NDArray[np.int64]
    """[values] 0, 1, 2 … policy versions."""
    recent: Floats
    """[values] share of the newest tenth of the trajectories, and of the last step's at least."""
    whole: Floats
    """[values] share of all."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """How many trajectories were sampled by which version and trained at which."""

    behaviour: Floats
    """[rows] oldest version that sampled the trajectory; the middle of each cell."""
    trained: Floats
    """[columns] version that the step made."""
    counts: npt.NDArray[np.int64]
    """[rows, columns] trajectories."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of some of the trajectories that the trainer took."""

    name: str
    """trained, or the drop_reason."""
    rollouts: int
    tokens: int
    """Response tokens."""
    mean_length: float
    """Response tokens; NaN where there are no rollouts."""
    mean_reward: float
    """Of the known ones; NaN where none is."""
    length_ratio: float
    """Its mean length over that of the trained ones; NaN where there are none."""


class _Stretches:
    """Trained rows cut into stretches of whole steps, at most 500. Rows of a step lie together, steps ascend."""

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

    def mean(self, column: str) -> Line:
        return Line(self.versions, np.add.reduceat(self.rows[column], self.starts, dtype=np.int64) / self.counts)

    def largest(self, column: str) -> Line:
        return Line(self.versions, np.maximum.reduceat(self.rows[column], self.starts).astype(np.float64))

    def place(self) -> npt.NDArray[np.int64]:
        """[rows] the stretch that each row is in."""
        return np.repeat(np.arange(len(self.starts)), self.counts)


def over_time(run: RunData) -> tuple[Line, Line]:
    """Mean and largest staleness."""
    stretches = _stretches(run, "staleness")
    return (stretches.mean("staleness"), stretches.largest("staleness")) if stretches else (NO_LINE, NO_LINE)


def bound(run: RunData) -> Line:
    """The bound in force, each value until the next: attempts may differ. Ends at the newest trained version."""
    versions: list[float] = []
    bounds: list[float] = []
    for attempt in reversed(run.facts.attempts):
        # What an attempt did behind the version that a later one went on from was rolled back.
        if not versions or attempt.first_step < versions[-1]:
            versions.append(float(attempt.first_step))
            bounds.append(float(attempt.max_staleness))
    trained = run.consumed["policy_version"][run.trained]
    newest = max(float(trained[-1]) if len(trained) else 0.0, versions[0])
    return Line(np.array([*versions[::-1], newest]), np.array([*bounds[::-1], bounds[0]]))


def split(run: RunData) -> tuple[Line, Line]:
    """Mean staleness that came about while groups were sampled, and while they lay in queues; the sum is the mean."""
    stretches = _stretches(run, "staleness", "staleness_in_flight")
    if stretches is None:
        return NO_LINE, NO_LINE
    in_flight = stretches.mean("staleness_in_flight")
    return in_flight, Line(in_flight.x, stretches.mean("staleness").y - in_flight.y)


def distribution(run: RunData) -> Distribution | None:
    """Of the newest trajectories beside the whole run; None before the first step."""
    rows = _trained(run, "staleness")
    versions, lags = rows["policy_version"], rows["staleness"]
    if not len(lags):
        return None
    last_step = int(np.searchsorted(versions, versions[-1]))
    recent = lags[min(last_step, len(lags) - int(np.ceil(len(lags) * _RECENT_SHARE))) :]
    whole = np.bincount(lags)
    return Distribution(
        staleness=np.arange(len(whole)),
        recent=np.bincount(recent, minlength=len(whole)) / len(recent),
        whole=whole / len(lags),
    )


def pairs(run: RunData) -> Pairs | None:
    """Of the newest 120 versions trained, one cell a version, so that the band along the diagonal can be told apart.

    Where behaviour versions span more than 120, several share a cell. None before the first step.
    """
    rows = _trained(run, "min_policy_version")
    versions, behaviour = rows["policy_version"], rows["min_policy_version"]
    if not len(versions):
        return None
    first = int(np.searchsorted(versions, versions[-1] - MOST_CELLS + 1))
    versions, behaviour = versions[first:], behaviour[first:]
    left, low = int(versions[0]), int(behaviour.min())
    size = -(-(int(behaviour.max()) - low + 1) // MOST_CELLS)
    row, column = (behaviour - low) // size, versions - left
    shape = int(row.max()) + 1, int(column[-1]) + 1
    counts = np.bincount(row * shape[1] + column, minlength=shape[0] * shape[1]).reshape(shape)
    return Pairs(
        behaviour=low + (size - 1) / 2 + size * np.arange(shape[0], dtype=np.float64),
        trained=left + np.arange(shape[1], dtype=np.float64),
        counts=counts,
    )


def by_generator(run: RunData) -> Mapping[int, Line]:
    """Mean staleness of each generator's trajectories."""
    stretches = _stretches(run, "staleness", "generator")
    if stretches is None:
        return {}
    generators = stretches.rows["generator"]
    num_generators = int(generators.max()) + 1
    shape = len(stretches.starts), num_generators
    cells = stretches.place() * num_generators + generators
    counts = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    sums = np.bincount(cells, stretches.rows["staleness"], shape[0] * shape[1]).reshape(shape)
    found = {}
    for generator in range(num_generators):
        made = counts[:, generator] > 0
        if made.any():
            means = sums[made, generator] / counts[made, generator]
            found[generator] = Line(stretches.versions[made], means)
    return found


def spans(run: RunData) -> Mapping[int, Line]:
    """Share of the trajectories that so many versions sampled, 1 to 5; 5 stands for more as well."""
    stretches = _stretches(run, "min_policy_version", "max_policy_version")
    if stretches is None:
        return {}
    rows = stretches.rows
    more = np.minimum(rows["max_policy_version"] - rows["min_policy_version"], MOST_SPANS - 1)
    shape = len(stretches.starts), MOST_SPANS
    counts = np.bincount(stretches.place() * MOST_SPANS + more, minlength=shape[0] * shape[1]).reshape(shape)
    shares = counts / stretches.counts[:, np.newaxis]
    return {number + 1: Line(stretches.versions, shares[:, number]) for number in range(MOST_SPANS)}


def mean_span(run: RunData) -> Line:
    """Versions that sampled a trajectory, mean."""
    stretches = _stretches(run, "min_policy_version", "max_policy_version")
    if stretches is None:
        return NO_LINE
    newest, oldest = stretches.mean("max_policy_version"), stretches.mean("min_policy_version")
    return Line(newest.x, newest.y - oldest.y + 1)


def outcomes(run: RunData) -> list[Outcome]:
    """Trained first, then each drop_reason that occurred."""
    codes, tokens, rewards = (run.consumed[name] for name in ("outcome", "tokens", "reward"))
    size = len(run.outcomes)
    rollouts, lengths = np.bincount(codes, minlength=size), np.bincount(codes, tokens, size)
    known = ~np.isnan(rewards)
    num_known, reward_sums = np.bincount(codes[known], minlength=size), np.bincount(codes[known], rewards[known], size)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_lengths, mean_rewards = lengths / rollouts, reward_sums / num_known
        ratios = mean_lengths / mean_lengths[0]
    return [
        Outcome(
            name=name,
            rollouts=int(rollouts[code]),
            tokens=int(lengths[code]),
            mean_length=float(mean_lengths[code]),
            mean_reward=float(mean_rewards[code]),
            length_ratio=float(ratios[code]),
        )
        for code, name in enumerate(run.outcomes)
        if code == 0 or rollouts[code]
    ]


def _stretches(run: RunData, *columns: str) -> _Stretches | None:
    """None before the first step."""
    rows = _trained(run, *columns)
    return _Stretches(rows) if len(rows["policy_version"]) else None


def _trained(run: RunData, *columns: str) -> Columns:
    """These columns and policy_version of the trained rows."""
    names, trained = ("policy_version", *columns), run.trained
    if trained.all():
        return {name: run.consumed[name] for name in names}
    return {name: run.consumed[name][trained] for name in names}
