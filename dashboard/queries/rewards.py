"""What the responses of each step earn and how long they are, from the rows that the trainer took.

consumed rows ─► groups ─► standard deviation of each group's rewards ─┬─► by policy version: mean and quantiles
              └─────────────────────────────── lengths of responses ───┘
metrics of the trainer ─► share of responses cut off, mean of each component of the reward
"""

import numpy as np
import numpy.typing as npt

from dashboard.queries.learning import TRAINER, measured
from dashboard.queries.series import Floats, Line, thin
from dashboard.read.model import RunData
from millrace.rewards.components import REWARD_COMPONENT

SPREAD_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
LENGTH_QUANTILES = {**SPREAD_QUANTILES, "p99": 0.99, "max": 1.0}
MOST_COMPONENTS = 16
"""Lines of one chart."""


def reward_spread(run: RunData) -> dict[str, Line]:
    """The standard deviation of the rewards within a group: mean and quantiles over the groups taken for each version.

    Dropped groups count; those with fewer than two known rewards do not.
    """
    consumed = run.consumed
    if len(consumed["policy_version"]) == 0:
        return {}
    starts = np.flatnonzero(consumed["sample_index"] == 0)
    rewards = consumed["reward"].astype(np.float64)
    has_reward = np.isfinite(rewards)
    rewards = np.where(has_reward, rewards, 0.0)
    counts = np.add.reduceat(has_reward, starts, dtype=np.int64)
    sums, squares = np.add.reduceat(rewards, starts), np.add.reduceat(rewards**2, starts)
    some = counts >= 2
    variance = squares[some] / counts[some] - (sums[some] / counts[some]) ** 2
    # Rounding may leave a little below 0 where all rewards are equal.
    deviations = np.sqrt(np.maximum(variance, 0.0))
    versions = consumed["policy_version"][starts][some]
    return {"mean": _means(versions, deviations), **_quantiles(versions, deviations, SPREAD_QUANTILES)}


def lengths(run: RunData) -> dict[str, Line]:
    """Quantiles of the number of response tokens over all responses taken for each version, dropped ones included."""
    return _quantiles(run.consumed["policy_version"], run.consumed["tokens"].astype(np.float64), LENGTH_QUANTILES)


def truncated_share(run: RunData) -> Line:
    """Share of a step's responses that were cut off; empty if the trainer has not measured it."""
    return measured(run, "truncated_share")


def components(run: RunData) -> dict[str, Line]:
    """Mean of each component of the reward over a step's responses, by name; at most 16."""
    names = sorted(name for name in run.metrics.get(TRAINER, {}) if name.startswith(REWARD_COMPONENT))
    return {name.removeprefix(REWARD_COMPONENT): measured(run, name) for name in names[:MOST_COMPONENTS]}


def _means(versions: npt.NDArray[np.int64], values: Floats) -> Line:
    distinct, at = np.unique(versions, return_inverse=True)
    return thin(Line(distinct.astype(np.float64), np.bincount(at, values, len(distinct)) / np.bincount(at)))


def _quantiles(versions: npt.NDArray[np.int64], values: Floats, shares: dict[str, float]) -> dict[str, Line]:
    """By name: for each version the smallest value that at least this share of its values do not exceed."""
    if len(versions) == 0:
        return {}
    order = np.lexsort((values, versions))
    distinct, starts, counts = np.unique(versions[order], return_index=True, return_counts=True)
    x, ascending = distinct.astype(np.float64), values[order]
    at = {name: starts + np.maximum(np.ceil(share * counts).astype(np.int64) - 1, 0) for name, share in shares.items()}
    return {name: thin(Line(x, ascending[at[name]]), largest=name == "max") for name in shares}
