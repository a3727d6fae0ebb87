"""What a trainer consumed, with a row per group: the table that a replay selects from, also by SQL.

consumed, a row per trajectory (g0,0) (g0,1) (g0,2) │ (g4,0) (g4,1) (g4,2) │ …     in the order of the batches
groups, a row per group          g0                │    g4                │ …
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.rollouts.consumed import TRAINED
from storage.schema import column

GROUPS: pa.Schema = pa.schema(
    [
        column("step", pa.int64(), "policy version made by the step that consumed the group"),
        column("incarnation", pa.int32(), "incarnation of the trainer that consumed it"),
        column("place", pa.int32(), "place among the groups that the step trained, from 0; -1: it was dropped"),
        column("generator", pa.int32(), "number of the generator that made it"),
        column("first_row_id", pa.int64(), "row_id of its first trajectory, in its generator's stream"),
        column("rollouts", pa.int32(), "trajectories in it; where a part could not be read, those lost"),
        column("verified", pa.int32(), "of these, those with a reward"),
        column("group_id", pa.int64(), "its number; -1 where a part could not be read"),
        column(
            "outcome",
            pa.string(),
            "trained, or the drop_reason: stale, error, corrupt, rolled_back, zero_advantage, truncated",
        ),
        column(
            "staleness", pa.int32(), "the trainer's version at that time minus the oldest of it that was not masked"
        ),
        column("staleness_in_flight", pa.int32(), "the part of it that arose during sampling, policy versions"),
        column("min_policy_version", pa.int64(), "oldest policy version that sampled a token of it"),
        column("max_policy_version", pa.int64(), "newest policy version that sampled a token of it"),
        column("t", pa.float64(), "when the step was done, unix seconds"),
        column("tokens", pa.int64(), "response tokens of all its trajectories"),
        column("length_mean", pa.float64(), "response tokens of a trajectory, mean"),
        column("reward_mean", pa.float64(), "of the known rewards; null where there is none", nullable=True),
        column("reward_min", pa.float64(), "of the known rewards; null where there is none", nullable=True),
        column("reward_max", pa.float64(), "of the known rewards; null where there is none", nullable=True),
    ]
)
"""Columns of the table, each documented."""


def group_table(
    rows: pa.Table, starts: npt.NDArray[np.int64], new_rewards: npt.NDArray[np.float32] | None = None
) -> pa.Table:
    """`GROUPS` from the surviving `rows` of CONSUMED; groups begin at `starts`.

    `new_rewards` ([rows], NaN for none) replace those in the rows.
    """

    def of(name: str) -> npt.NDArray[np.generic]:
        values: npt.NDArray[np.generic] = rows[name].to_numpy()
        return values

    sizes = np.diff(starts, append=rows.num_rows)
    tokens = np.add.reduceat(of("tokens").astype(np.int64), starts)
    was_trained = np.logical_or.reduceat(of("outcome") == TRAINED, starts)
    steps = of("policy_version")[starts]
    first = {name: of(name)[starts] for name in ("incarnation", "generator", "group_id", "staleness", "t")}
    outcomes = np.where(was_trained, TRAINED, of("outcome")[starts])
    columns = {
        **first,
        **_of_rewards(of("reward") if new_rewards is None else new_rewards, starts),
        "step": steps,
        "place": _places(steps, was_trained),
        "first_row_id": of("trajectory_row_id")[starts],
        "rollouts": sizes,
        "outcome": outcomes,
        "staleness_in_flight": of("staleness_in_flight")[starts],
        "min_policy_version": np.minimum.reduceat(of("min_policy_version"), starts),
        "max_policy_version": np.maximum.reduceat(of("max_policy_version"), starts),
        "tokens": tokens,
        "length_mean": tokens / sizes,
    }
    return pa.Table.from_arrays([pa.array(columns[f.name], f.type) for f in GROUPS], schema=GROUPS)


def _of_rewards(rewards: npt.NDArray[np.generic], starts: npt.NDArray[np.int64]) -> dict[str, object]:
    values = rewards.astype(np.float64)
    known = np.isfinite(values)
    num_known = np.add.reduceat(known.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    found = {
        "reward_mean": sums / np.maximum(num_known, 1),
        "reward_min": np.minimum.reduceat(np.where(known, values, np.inf), starts),
        "reward_max": np.maximum.reduceat(np.where(known, values, -np.inf), starts),
    }
    nullable = {name: pa.array(of_groups, mask=num_known == 0) for name, of_groups in found.items()}
    return {"verified": num_known, **nullable}


def _places(steps: npt.NDArray[np.generic], was_trained: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    places = np.full(len(steps), -1, dtype=np.int64)
    trained = steps[was_trained]
    # Steps ascend, so searchsorted finds the first group of each step.
    places[was_trained] = np.arange(len(trained)) - np.searchsorted(trained, trained)
    return places
