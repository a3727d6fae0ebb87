"""A table of the groups that a trainer consumed, a row per group: a replay selects from it, also by SQL.

consumed, a row per trajectory (g0,0) (g0,1) (g0,2) │ (g4,0) (g4,1) (g4,2) │ …     in the order of the batches
groups, a row per group          g0                │    g4                │ …
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.rollouts.consumed import TRAINED
from storage.schema import column

_INT, _LONG, _FLOAT = pa.int32(), pa.int64(), pa.float64()
_REWARD = "of the known rewards; null where there is none"
_COLUMNS: list[tuple[pa.Field, str, str]] = [
    (column("step", _LONG, "policy version made by the step that consumed the group"), "policy_version", "first"),
    (column("incarnation", _INT, "incarnation of the trainer that consumed it"), "incarnation", "first"),
    (column("generator", _INT, "number of the generator that made it"), "generator", "first"),
    (column("first_row_id", _LONG, "row_id of its first trajectory, in its generator's stream"), "row", "first"),
    (column("rollouts", _INT, "trajectories in it; where a part could not be read, those lost"), "row", "count"),
    (column("verified", _INT, "of these, those with a reward"), "reward", "count"),
    (column("group_id", _LONG, "its number; -1 where a part could not be read"), "group_id", "first"),
    (
        column("staleness", _INT, "the trainer's version at that time minus the oldest of it that was not masked"),
        "staleness",
        "first",
    ),
    (
        column("staleness_in_flight", _INT, "the part of it that arose during sampling, policy versions"),
        "staleness_in_flight",
        "first",
    ),
    (column("min_policy_version", _LONG, "oldest policy version that sampled a token"), "min_policy_version", "min"),
    (column("max_policy_version", _LONG, "newest policy version that sampled a token"), "max_policy_version", "max"),
    (column("t", _FLOAT, "when the step was done, unix seconds"), "t", "first"),
    (column("tokens", _LONG, "response tokens of all its trajectories"), "tokens", "sum"),
    (column("length_mean", _FLOAT, "response tokens of a trajectory, mean"), "tokens", "mean"),
    *((column(f"reward_{which}", _FLOAT, _REWARD, nullable=True), "reward", which) for which in ("mean", "min", "max")),
]
"""Column of the table, column of CONSUMED (`row`: trajectory_row_id), and how a group's rows are aggregated."""
_PLACE = column("place", _INT, "place among the groups that the step trained, from 0; -1: it was dropped")
_OUTCOME = column("outcome", pa.string(), "trained, or the drop_reason: stale, error, corrupt, rolled_back, …")


def group_table(
    rows: pa.Table, starts: npt.NDArray[np.int64], new_rewards: npt.NDArray[np.float32] | None = None
) -> pa.Table:
    """The table of the surviving `rows` of CONSUMED; groups begin at `starts`.

    `new_rewards` ([rows], NaN for none) replace those in the rows.
    """
    number = np.zeros(rows.num_rows, dtype=np.int64)
    number[starts] = 1
    rewards = (rows["reward"].to_numpy() if new_rewards is None else new_rewards).astype(np.float64)
    columns = {name: rows[name] for name in rows.column_names} | {
        "group": np.cumsum(number),
        "row": rows["trajectory_row_id"],
        "reward": pa.array(rewards, mask=~np.isfinite(rewards)),
        "trained": pc.equal(rows["outcome"], TRAINED),
    }
    wanted = [("trained", "any"), ("outcome", "first"), *((name, how) for _, name, how in _COLUMNS)]
    groups = pa.table(columns).group_by("group", use_threads=False).aggregate(list(dict.fromkeys(wanted)))
    table = pa.table(
        [groups[f"{name}_{how}"].cast(field.type) for field, name, how in _COLUMNS],
        names=[field.name for field, _, _ in _COLUMNS],
    )
    trained, steps = groups["trained_any"].to_numpy(), table["step"].to_numpy()
    places = np.full(len(steps), -1, dtype=np.int32)
    # Steps ascend, so searchsorted finds the first group of each step.
    places[trained] = np.arange(trained.sum()) - np.searchsorted(steps[trained], steps[trained])
    outcomes = pc.if_else(groups["trained_any"], TRAINED, groups["outcome_first"])
    return table.append_column(_PLACE, pa.array(places)).append_column(_OUTCOME, outcomes)
