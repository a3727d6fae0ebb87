"""The trainer's two streams: the outcome of each trajectory, and log π of every trained token.

    step ─► its groups, in the order of the batch   ─► a row per trajectory ─┬─► ║ consumed ║          small, for plots
            groups and parts dropped before it      ─► a row per trajectory ─┘
            log π of every trained token            ───────────────────────────► ║ trainer_logprobs ║  as large as μ's

Both are committed about once a second, and completely before a checkpoint: they hold every row that the checkpoint's
account counts. A restarted trainer repeats the steps after its checkpoint; `lineage.surviving` finds the rows that
count.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.rollouts.lineage import surviving
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from storage import layout
from storage.schema import CONSUMED, TRAINER_LOGPROBS
from storage.stores.base import Store
from storage.streams.group_commit import GroupCommit
from storage.streams.stream import StreamReader, StreamWriter

TRAINED = "trained"
"""The outcome of a trajectory that was not dropped."""
_SECONDS, _ROWS, _BYTES = 1.0, 1 << 16, 8 << 20


def read_consumed(store: Store) -> pa.Table:
    """The rows of CONSUMED that were not rolled back, in the order of the stream. Raises StreamCorrupt."""
    reader = StreamReader(store, layout.CONSUMED, CONSUMED)
    rows = pa.concat_tables([CONSUMED.empty_table(), *(part.table for part in iter(reader.next, None))])
    incarnations, versions = (rows[name].to_numpy() for name in ("incarnation", "policy_version"))
    return rows.filter(pa.array(surviving(incarnations, versions))).combine_chunks()


class ConsumedWriter:
    """Writes both streams for the trainer `incarnation`."""

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
        # Rows of groups dropped since the last step. A group itself would keep its part in memory.
        self._dropped: list[dict[str, object]] = []

    def drop(self, group: ScoredGroup | LostPart, reason: str, trainer_version: int) -> None:
        """Records a drop before the next step. It is written with that step."""
        if isinstance(group, LostPart):
            self._dropped += _lost(group, reason)
        else:
            self._dropped += _dropped(group, reason, trainer_version)

    def step(
        self,
        policy_version: int,
        groups: Sequence[ScoredGroup],
        advantages: Iterable[float],
        trainer_logprobs: Sequence[npt.NDArray[np.float32]],
        trainer_versions: Sequence[int] | None = None,
    ) -> None:
        """Writes the step that made `policy_version` and trained `groups`, in this order.

        `advantages` and `trainer_logprobs` have one item per trained trajectory. `trainer_versions` has one per group,
        the trainer's version when it took the group; by default the previous version.
        """
        now = time.time()
        stamp = {"t": now, "incarnation": self._incarnation, "policy_version": policy_version}
        remaining_advantages = iter(advantages)
        rows = [{**stamp, **row} for row in self._dropped]
        versions = [policy_version - 1] * len(groups) if trainer_versions is None else trainer_versions
        rows += [
            {**stamp, **row}
            for group, version in zip(groups, versions, strict=True)
            for row in _trained(group, version, remaining_advantages)
        ]
        self._dropped = []
        keys = [row for row in rows if row["outcome"] == TRAINED]
        self._append(self._logprobs, _logprobs_table(keys, trainer_logprobs), policy_version)
        self._append(self._consumed, pa.Table.from_pylist(rows, schema=CONSUMED), policy_version)

    def flush(self) -> None:
        """Makes both durable up to the last step."""
        self._logprobs.flush()
        self._consumed.flush()

    def close(self) -> None:
        """Commits the rest and ends."""
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


def _trained(group: ScoredGroup, trainer_version: int, advantages: Iterable[float]) -> list[dict[str, object]]:
    of_trained = iter(advantages)
    reasons = [group.drop_reason_of(i) for i in range(len(group.rewards))]
    # The same for all members: once is enough.
    staleness = group.staleness(trainer_version)
    return [
        {
            **row,
            "outcome": reason or TRAINED,
            "staleness": staleness,
            "advantage": next(of_trained) if reason is None else None,
            "masked_tokens": masked,
        }
        for row, reason, masked in zip(_dropped(group, "", trainer_version), reasons, group.masked_tokens, strict=True)
    ]


def _dropped(group: ScoredGroup, reason: str, trainer_version: int) -> list[dict[str, object]]:
    oldest, newest = group.min_policy_versions.tolist(), group.max_policy_versions.tolist()
    group_oldest, group_newest = min(oldest), max(newest)
    return [
        {
            "generator": group.generator,
            "trajectory_row_id": group.first_row_id + i,
            "group_id": group.group_id,
            "sample_index": i,
            "outcome": reason,
            "staleness": trainer_version - group_oldest,
            "staleness_in_flight": group_newest - group_oldest,
            "min_policy_version": oldest[i],
            "max_policy_version": newest[i],
            "tokens": len(group.response_tokens[i]),
            "reward": reward,
            "advantage": None,
            "masked_tokens": 0,
        }
        for i, reward in enumerate(group.rewards)
    ]


def _lost(part: LostPart, reason: str) -> list[dict[str, object]]:
    """Rows for a damaged part: only its rows, tokens and range of versions are known."""
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
            "masked_tokens": 0,
        }
        for i in range(left.rollouts)
    ]


def _logprobs_table(rows: Sequence[Mapping[str, object]], values: Sequence[npt.NDArray[np.float32]]) -> pa.Table:
    names = ("incarnation", "policy_version", "generator", "trajectory_row_id")
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in names}
    columns["trainer_logprobs"] = list(values)
    return pa.Table.from_pydict(columns, schema=TRAINER_LOGPROBS)
