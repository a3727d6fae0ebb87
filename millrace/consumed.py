"""What became of each trajectory that the trainer took, and what its policy thought of every token: two streams.

    step ─► its groups, in the order of the batch   ─► a row a trajectory ─┬─► ║ consumed ║          small, for plots
            groups and parts dropped before it      ─► a row a trajectory ─┘
            log π of every trained token            ─────────────────────────► ║ trainer_logprobs ║  as large as μ's

Both are committed about once a second, and whole before a checkpoint is: what a checkpoint's account counts is told
here row by row. A trainer that is started anew repeats the steps behind its checkpoint. So a row holds as long as no
later row is of the same step, or an earlier one, and of a newer incarnation: `until` tells.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.scored import LostPart, ScoredGroup
from storage import layout
from storage.group_commit import GroupCommit
from storage.schema import CONSUMED, TRAINER_LOGPROBS
from storage.store import Store
from storage.stream import StreamWriter

TRAINED = "trained"
"""The outcome of what was not dropped."""
_SECONDS, _ROWS, _BYTES = 1.0, 1 << 16, 8 << 20


class ConsumedWriter:
    """Writes both streams of a run's trainer, which is started as `incarnation`."""

    def __init__(self, store: Store, incarnation: int) -> None:
        self._incarnation = incarnation
        self._consumed, self._logprobs = (
            GroupCommit(
                StreamWriter(store, path, schema, writer="train-0"),
                max_rows=_ROWS,
                max_bytes=_BYTES,
                max_seconds=_SECONDS,
            )
            for path, schema in ((layout.CONSUMED, CONSUMED), (layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS))
        )
        self._dropped: list[tuple[ScoredGroup | LostPart, str, int]] = []

    def drop(self, group: ScoredGroup | LostPart, reason: str, trainer_version: int) -> None:
        """Notes what was dropped on the way to the next step; it counts once that step is done."""
        self._dropped.append((group, reason, trainer_version))

    def step(
        self,
        policy_version: int,
        groups: Sequence[ScoredGroup],
        advantages: Iterable[float],
        trainer_logprobs: Sequence[npt.NDArray[np.float32]],
        staleness: Sequence[int] | None = None,
    ) -> None:
        """The step that made `policy_version` is done: of `groups`, in this order, it trained the verified members.

        `advantages` and `trainer_logprobs` are theirs, one a trained trajectory. `staleness` is the groups'; None: how
        far the version before this one is ahead of their oldest weights.
        """
        now = time.time()
        stamp = {"t": now, "incarnation": self._incarnation, "policy_version": policy_version}
        of_trained = iter(advantages)
        rows = [
            {**stamp, **row}
            for group, reason, version in self._dropped
            for row in (_lost(group, reason) if isinstance(group, LostPart) else _dropped(group, reason, version))
        ]
        ahead = [policy_version - 1 - group.min_policy_version for group in groups] if staleness is None else staleness
        rows += [
            {**stamp, **row}
            for group, lag in zip(groups, ahead, strict=True)
            for row in _trained(group, group.min_policy_version + lag, of_trained)
        ]
        self._dropped = []
        keys = [row for row in rows if row["outcome"] == TRAINED]
        self._append(self._logprobs, _logprobs_table(keys, trainer_logprobs), policy_version)
        self._append(self._consumed, pa.Table.from_pylist(rows, schema=CONSUMED), policy_version)

    def flush(self) -> None:
        """Both are durable on return, up to the last step."""
        self._logprobs.flush()
        self._consumed.flush()

    def close(self) -> None:
        """Commits what is left."""
        self._logprobs.close()
        self._consumed.close()

    def _append(self, stream: GroupCommit, table: pa.Table, policy_version: int) -> None:
        tokens = int(np.sum(table["tokens"])) if "tokens" in table.column_names else 0
        stream.append(
            table,
            tokens=tokens,
            min_policy_version=policy_version,
            max_policy_version=policy_version,
            incarnation=self._incarnation,
        )


def until(incarnations: npt.NDArray[np.int32], policy_versions: npt.NDArray[np.int64]) -> dict[int, int]:
    """Incarnation → its newest policy version that was not rolled back; of rows in the order of their stream.

    A row holds where its policy_version is not above its incarnation's. Of a trainer that was started anew and has not
    finished a step yet, nothing is known here.
    """
    found: dict[int, int] = {}
    starts = np.flatnonzero(np.diff(incarnations, prepend=incarnations[:1] - 1))
    ends = np.append(starts[1:], len(incarnations))[: len(starts)]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        first = int(policy_versions[start])
        found = {incarnation: min(newest, first - 1) for incarnation, newest in found.items()}
        found[int(incarnations[start])] = int(policy_versions[start:end].max())
    return found


def holds(
    incarnations: npt.NDArray[np.int32], policy_versions: npt.NDArray[np.int64], newest: Mapping[int, int]
) -> npt.NDArray[np.bool_]:
    """Which rows were not rolled back, by what `until` found."""
    limits = np.full(max(newest, default=-1) + 1, -1, dtype=np.int64)
    limits[list(newest)] = list(newest.values())
    kept: npt.NDArray[np.bool_] = policy_versions <= limits[incarnations]
    return kept


def _trained(group: ScoredGroup, trainer_version: int, advantages: Iterable[float]) -> list[dict[str, object]]:
    verified = set(group.verified)
    of_trained = iter(advantages)
    return [
        {
            **row,
            "outcome": TRAINED if i in verified else "error",
            "advantage": next(of_trained) if i in verified else None,
        }
        for i, row in enumerate(_dropped(group, "", trainer_version))
    ]


def _dropped(group: ScoredGroup, reason: str, trainer_version: int) -> list[dict[str, object]]:
    in_flight = group.max_policy_version - group.min_policy_version
    return [
        {
            "generator": group.generator,
            "trajectory_row_id": group.first_row_id + i,
            "group_id": group.group_id,
            "sample_index": i,
            "outcome": reason,
            "staleness": trainer_version - group.min_policy_version,
            "staleness_in_flight": in_flight,
            "min_policy_version": int(group.min_policy_versions[i]),
            "max_policy_version": int(group.max_policy_versions[i]),
            "tokens": len(group.response_tokens[i]),
            "reward": reward,
            "advantage": None,
        }
        for i, reward in enumerate(group.rewards)
    ]


def _lost(part: LostPart, reason: str) -> list[dict[str, object]]:
    """A damaged part: how many rows and tokens are lost is known, and between which versions, but no more."""
    record, left = part.record, part.left
    first = record.rows - left.rollouts
    each, rest = divmod(left.tokens, max(1, left.rollouts))
    return [
        {
            "generator": part.generator,
            "trajectory_row_id": record.first_row_id + first + i,
            "group_id": -1,
            "sample_index": i,
            "outcome": reason,
            "staleness": 0,
            "staleness_in_flight": 0,
            "min_policy_version": record.min_policy_version,
            "max_policy_version": record.max_policy_version,
            "tokens": each + (rest if i == 0 else 0),
            "reward": None,
            "advantage": None,
        }
        for i in range(left.rollouts)
    ]


def _logprobs_table(rows: Sequence[Mapping[str, object]], values: Sequence[npt.NDArray[np.float32]]) -> pa.Table:
    names = ("incarnation", "policy_version", "generator", "trajectory_row_id")
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in names}
    columns["trainer_logprobs"] = list(values)
    return pa.Table.from_pydict(columns, schema=TRAINER_LOGPROBS)
