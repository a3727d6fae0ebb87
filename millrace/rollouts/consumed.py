"""The trainer's two streams: the outcome of each trajectory, and log π and entropy of every trained token.

    step ─► its groups, in the order of the batch   ─► a row per trajectory ─┬─► ║ consumed ║          small, for plots
            groups and parts dropped before it      ─► a row per trajectory ─┘
            log π, entropy of every trained token   ───────────────────────────► ║ trainer_logprobs ║  as large as μ's

Both are committed about once a second, and completely before a checkpoint: they hold every row that the checkpoint's
account counts. A restarted trainer repeats the steps after its checkpoint; `lineage.surviving` finds the rows that
count.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.rollouts.ledger import Amount
from millrace.rollouts.lineage import Lineage, Survivors, part_of_step, surviving
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from millrace.rollouts.staleness import staleness
from storage import layout
from storage.schema import CONSUMED, TRAINER_LOGPROBS
from storage.stores.base import Store
from storage.streams.group_commit import GroupCommit
from storage.streams.stream import StreamReader, StreamWriter, read_part

TRAINED = "trained"
"""The outcome of a trajectory that was not dropped."""


def read_consumed(store: Store) -> pa.Table:
    """The rows of CONSUMED that were not rolled back, in the order of the stream. Raises StreamCorrupt."""
    reader = StreamReader(store, layout.CONSUMED, CONSUMED)
    rows = pa.concat_tables([CONSUMED.empty_table(), *(part.table for part in iter(reader.next, None))])
    incarnations, versions = (rows[name].to_numpy() for name in ("incarnation", "policy_version"))
    return rows.filter(pa.array(surviving(incarnations, versions))).combine_chunks()


def read_consumed_step(store: Store, step: int) -> pa.Table:
    """The rows of CONSUMED of the step that made version `step`; empty if there is none. Raises StreamCorrupt."""
    part = part_of_step(store, layout.CONSUMED, step)
    if part is None:
        return CONSUMED.empty_table()
    rows = read_part(store, layout.CONSUMED, CONSUMED, part)
    return rows.filter(pc.equal(rows["policy_version"], step)).combine_chunks()


class SourceLedger:
    """Sums groups and amounts by source that a trainer of this lineage consumed. Unreadable parts are skipped."""

    def __init__(self, store: Store, lineage: Lineage) -> None:
        # By source and outcome.
        self._amounts = defaultdict[str, dict[str, Amount]](dict)
        # By source, and whether any of the group was trained.
        self._groups = Counter[tuple[str, bool]]()
        columns = ["incarnation", "policy_version", "source", "group_id", "outcome", "tokens"]
        survivors = Survivors(lineage.until)
        for part in StreamReader(store, layout.CONSUMED, CONSUMED, columns=columns).readable():
            incarnations, versions = (part.table[name].to_numpy() for name in ("incarnation", "policy_version"))
            self.add(part.table.filter(pa.array(survivors.mask(incarnations, versions))))

    def add(self, rows: pa.Table) -> None:
        """Counts rows of CONSUMED: whole steps."""
        amounts = rows.group_by(["source", "outcome"], use_threads=False).aggregate(
            [("tokens", "count"), ("tokens", "sum")]
        )
        for row in amounts.to_pylist():
            of_source, outcome = self._amounts[row["source"]], row["outcome"]
            amount = Amount(rollouts=row["tokens_count"], tokens=row["tokens_sum"])
            of_source[outcome] = of_source.get(outcome, Amount()) + amount
        # Groups of rolled-back weights are generated again. Of those of a damaged part the source is not known.
        rows = rows.filter(pc.and_(pc.greater_equal(rows["group_id"], 0), pc.not_equal(rows["outcome"], "rolled_back")))
        rows = rows.append_column("trained", pc.equal(rows["outcome"], TRAINED))
        groups = rows.group_by(["source", "group_id"], use_threads=False).aggregate([("trained", "any")])
        for row in groups.to_pylist():
            self._groups[row["source"], row["trained_any"]] += 1

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Groups and amounts by source, as in `millrace.rollouts.ledger`. The source of damaged parts is ``."""
        return {
            source: {
                "groups_trained": self._groups[source, True],
                "groups_dropped": self._groups[source, False],
                "trained": amounts.get(TRAINED, Amount()).to_json(),
                "dropped": {
                    outcome: amount.to_json() for outcome, amount in sorted(amounts.items()) if outcome != TRAINED
                },
            }
            for source, amounts in sorted(self._amounts.items())
        }


class ConsumedWriter:
    """Writes both streams for the trainer `incarnation`."""

    def __init__(self, store: Store, incarnation: int) -> None:
        self._incarnation = incarnation
        limits: dict[str, Any] = {"max_rows": 1 << 16, "max_bytes": 8 << 20, "max_seconds": 1.0}
        self._consumed, self._logprobs = (
            GroupCommit(StreamWriter(store, path, schema, writer="train-0"), **limits)
            for path, schema in ((layout.CONSUMED, CONSUMED), (layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS))
        )
        # Rows of groups dropped since the last step. A group itself would keep its part in memory.
        self._dropped: list[dict[str, object]] = []

    def drop(self, group: ScoredGroup | LostPart, reason: str, trainer_version: int) -> None:
        """Records a drop before the next step. It is written with that step."""
        if isinstance(group, LostPart):
            self._dropped += _lost(group, reason)
        else:
            outcomes = [reason] * len(group.rewards)
            self._dropped += _group_rows(group, outcomes, staleness(trainer_version, group.min_policy_version))

    def step(
        self,
        policy_version: int,
        groups: Sequence[ScoredGroup],
        advantages: Iterable[float],
        trainer_logprobs: Sequence[npt.NDArray[np.float32]],
        trainer_entropies: Sequence[npt.NDArray[np.float32]],
        trainer_versions: Sequence[int] | None = None,
    ) -> pa.Table:
        """Writes the step that made `policy_version` and trained `groups`, in this order. Returns its rows of CONSUMED.

        `advantages`, `trainer_logprobs` and `trainer_entropies` have one item per trained trajectory.
        `trainer_versions` has one per group, the trainer's version when it took the group; by default the previous one.
        """
        stamp = {"t": time.time(), "incarnation": self._incarnation, "policy_version": policy_version}
        rows = self._dropped
        trained_rows: list[dict[str, object]] = []
        versions = [policy_version - 1] * len(groups) if trainer_versions is None else trainer_versions
        for group, version in zip(groups, versions, strict=True):
            outcomes = [group.drop_reason_of(i) or TRAINED for i in range(len(group.rewards))]
            group_rows = _group_rows(group, outcomes, group.staleness(version))
            for row, masked_tokens in zip(group_rows, group.masked_tokens, strict=True):
                row["masked_tokens"] = masked_tokens
            trained_rows += [row for row in group_rows if row["outcome"] == TRAINED]
            rows += group_rows
        for row, advantage in zip(trained_rows, advantages, strict=True):
            row["advantage"] = advantage
        for row in rows:
            row |= stamp
        self._dropped = []
        names = ("incarnation", "policy_version", "generator", "trajectory_row_id")
        columns: dict[str, object] = {name: [row[name] for row in trained_rows] for name in names}
        columns |= {"trainer_logprobs": list(trainer_logprobs), "trainer_entropies": list(trainer_entropies)}
        self._append(self._logprobs, pa.Table.from_pydict(columns, schema=TRAINER_LOGPROBS), policy_version)
        consumed = pa.Table.from_pylist(rows, schema=CONSUMED)
        self._append(self._consumed, consumed, policy_version)
        return consumed

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


def _group_rows(group: ScoredGroup, outcomes: Sequence[str], staleness: int) -> list[dict[str, object]]:
    """Rows without advantages and masked tokens; `outcomes` is [G]."""
    oldest, newest = group.min_policy_versions.tolist(), group.max_policy_versions.tolist()
    return [
        {
            "generator": group.generator,
            "trajectory_row_id": group.first_row_id + i,
            "group_id": group.group_id,
            "source": group.source,
            "prompt_id": group.prompt_id,
            "sample_index": i,
            "outcome": outcome,
            "staleness": staleness,
            "staleness_in_flight": max(newest) - min(oldest),
            "min_policy_version": oldest[i],
            "max_policy_version": newest[i],
            "tokens": len(group.response_tokens[i]),
            "reward": group.rewards[i],
            "masked_tokens": 0,
        }
        for i, outcome in enumerate(outcomes)
    ]


def _lost(part: LostPart, reason: str) -> list[dict[str, object]]:
    """Rows for a damaged part: only its rows, tokens and range of versions are known."""
    record, left = part.record, part.left
    first = record.first_row_id + record.rows - left.rollouts
    each, rest = divmod(left.tokens, max(1, left.rollouts))
    return [
        {
            "generator": part.generator,
            "trajectory_row_id": first + i,
            "group_id": -1,
            "source": "",
            "prompt_id": "",
            "sample_index": i,
            "outcome": reason,
            "staleness": 0,
            "staleness_in_flight": 0,
            "min_policy_version": record.min_policy_version,
            "max_policy_version": record.max_policy_version,
            "tokens": each + (rest if i == 0 else 0),
            "masked_tokens": 0,
        }
        for i in range(left.rollouts)
    ]
