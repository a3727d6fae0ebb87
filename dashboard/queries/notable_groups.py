"""Groups of the newest steps worth reading first: the best, the worst, and one without reward spread."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dashboard.queries.verdict.facts import STEPS
from dashboard.read.model import RunData


@dataclass(frozen=True, kw_only=True)
class NotableGroup:
    """A notable group."""

    why: str
    """best, worst or no spread."""
    generator: int
    row_id: int
    """Row of its first trajectory."""
    group_id: int
    """-1 if its part can't be read."""
    policy_version: int
    """Version made by the step that took the group."""
    reward: float
    """Mean of the known rewards."""


def notable_groups(run: RunData) -> Sequence[NotableGroup]:
    """Returns the groups of the newest 20 versions with the highest and the lowest mean reward, and one in which all
    rewards are equal, if they exist; of several, the newest."""
    versions = run.consumed["policy_version"]
    first = int(np.searchsorted(versions, versions[-1] - STEPS, side="right")) if len(versions) else 0
    rows = {name: column[first:] for name, column in run.consumed.items()}
    has_reward = np.isfinite(rows["reward"])
    starts = np.flatnonzero(rows["sample_index"] == 0)
    if not len(starts):
        return []
    rewards = np.where(has_reward, rows["reward"], 0.0).astype(np.float64)
    counts = np.add.reduceat(has_reward, starts, dtype=np.int64)
    means = np.add.reduceat(rewards, starts) / np.maximum(counts, 1)
    highest = np.maximum.reduceat(np.where(has_reward, rows["reward"], -np.inf), starts)
    lowest = np.minimum.reduceat(np.where(has_reward, rows["reward"], np.inf), starts)
    notable = {
        "best": _last(np.where(counts > 0, means, -np.inf)),
        "worst": _last(np.where(counts > 0, -means, -np.inf)),
        "no spread": _last(np.where((counts > 1) & (highest == lowest), 0.0, -np.inf)),
    }
    return [
        NotableGroup(
            why=why,
            generator=int(rows["generator"][starts[index]]),
            row_id=int(rows["trajectory_row_id"][starts[index]]),
            group_id=int(rows["group_id"][starts[index]]),
            policy_version=int(rows["policy_version"][starts[index]]),
            reward=float(means[index]),
        )
        for why, index in notable.items()
        if index is not None
    ]


def _last(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> int | None:
    """Returns the last index of the maximum; None if the maximum is −∞."""
    largest = values.max()
    return int(np.flatnonzero(values == largest)[-1]) if np.isfinite(largest) else None
