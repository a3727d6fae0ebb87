"""Rewards and lengths of the responses of each step, from the rows that the trainer took.

consumed rows ─► groups ─► standard deviation of each group's rewards ─┬─► by policy version: mean and quantiles
              └─────────────────────────────── lengths of responses ───┘
metrics of the trainer ─► share of truncated responses, mean of each component of the reward
"""

import numpy as np
import numpy.typing as npt

from dashboard.queries.learning import TRAINER, measured
from dashboard.queries.series import ChartLine, Floats, thin
from dashboard.read.model import RunData
from millrace.rewards.base import REWARD_COMPONENT

SPREAD_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
LENGTH_QUANTILES = {**SPREAD_QUANTILES, "p99": 0.99, "max": 1.0}
MOST_COMPONENTS = 16
"""Maximum number of lines in the chart."""


def reward_spread(run: RunData) -> dict[str, ChartLine]:
    """Standard deviation of the rewards within a group: mean and quantiles over the groups taken for each version.

    Includes dropped groups, but not groups with fewer than two known rewards.
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
    # Rounding may give values slightly below 0 where all rewards are equal.
    deviations = np.sqrt(np.maximum(variance, 0.0))
    versions = consumed["policy_version"][starts][some]
    return {"mean": _means(versions, deviations), **_quantiles(versions, deviations, SPREAD_QUANTILES)}


def lengths(run: RunData) -> dict[str, ChartLine]:
    """Quantiles of the response length in tokens over all responses taken for each version, including dropped ones."""
    return _quantiles(run.consumed["policy_version"], run.consumed["tokens"].astype(np.float64), LENGTH_QUANTILES)


def components(run: RunData) -> dict[str, ChartLine]:
    """Name of a reward component → mean over a step's responses; at most 16 components."""
    names = sorted(name for name in run.metrics.get(TRAINER, {}) if name.startswith(REWARD_COMPONENT))
    return {name.removeprefix(REWARD_COMPONENT): measured(run, name) for name in names[:MOST_COMPONENTS]}


def _means(versions: npt.NDArray[np.int64], values: Floats) -> ChartLine:
    distinct, at = np.unique(versions, return_inverse=True)
    return thin(ChartLine(distinct.astype(np.float64), np.bincount(at, values, len(distinct)) / np.bincount(at)))


def _quantiles(versions: npt.NDArray[np.int64], values: Floats, shares: dict[str, float]) -> dict[str, ChartLine]:
    """Quantile name → for each version, the smallest value not exceeded by this share of its values."""
    if len(versions) == 0:
        return {}
    order = np.lexsort((values, versions))
    distinct, starts, counts = np.unique(versions[order], return_index=True, return_counts=True)
    x, ascending = distinct.astype(np.float64), values[order]
    at = {name: starts + np.maximum(np.ceil(share * counts).astype(np.int64) - 1, 0) for name, share in shares.items()}
    return {name: thin(ChartLine(x, ascending[at[name]]), largest=name == "max") for name in shares}
