"""Checks of values that are stored twice: in records and rows, annotations and trajectories, checkpoint and streams.

records ─► true cursor at the same place ─┐
                                          ├─ equal? ─► consumed = trained + dropped ≤ scored ≤ generated?
checkpoint ─► its cursor ─────────────────┘
           ─► its account ───────────────────────────┐
                                                     ├─ equal? by outcome, by generator, by staleness; masked
║ consumed ║ ─► rows not rolled back, up to its version
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.errors import LedgerMismatch
from millrace.maintenance.contents import Contents, StoredStream, run_annotators
from millrace.rollouts.consumed import TRAINED, read_consumed
from millrace.rollouts.ledger import Account, Amount, amount_scored
from millrace.rollouts.loader import consumed_by
from storage import layout
from storage.checkpoints import Checkpoint
from storage.errors import PartRemoved, StreamCorrupt
from storage.streams.log import LogCursor
from storage.streams.record import Record


def contradictions(record: Record, rows: pa.Table) -> Iterator[str]:
    """Yields a clause for each value of a part's record that its rows contradict."""
    values: dict[str, object] = {}
    has_ids = "row_id" in rows.column_names
    if has_ids:
        values["first_row_id"] = rows["row_id"][0].as_py()
    if "response_tokens" in rows.column_names:
        values["tokens"] = pc.sum(pc.list_value_length(rows["response_tokens"])).as_py()
        values["min_policy_version"] = pc.min(rows["min_policy_version"]).as_py()
        # Records of unfinished responses, whose rows have no row_id, name no groups.
        if has_ids:
            values["group_ids"] = rows["group_id"].unique().to_pylist()
    for name, value in values.items():
        if (recorded := getattr(record, name)) != value:
            yield f"{name} of the rows is {value}, but the record says {recorded}"


def misaligned_annotations(
    stream: StoredStream, annotations: Sequence[Record], trajectories: Sequence[Record]
) -> Iterator[str]:
    """Yields a clause for each part of annotations with other rows than its trajectories.

    Row ids are consecutive in each part, so ranges are compared.
    """
    ranges = {record.part: f"{record.rows} rows from {record.first_row_id} on" for record in trajectories}
    for record in annotations:
        part = layout.annotated_part(stream.annotator, record.part, stream.num_annotators)
        rows = f"{record.rows} rows from {record.first_row_id} on"
        if ranges.get(part) != rows:
            expected = f"trajectory part {part} has {ranges.get(part, 'no rows')}"
            yield f"part {record.part} annotates {rows}, but {expected}"


def check_ledger(contents: Contents, checkpoint: Checkpoint) -> None:
    """Compares a checkpoint with the streams, unless one of those that it names is damaged.

    Raises LedgerMismatch; StreamCorrupt if the run's config can't be read; KeyError, TypeError or ValueError if the
    checkpoint can't be read.
    """
    logs = {path: log for path, log in contents.logs.items() if log.damage is None}
    pools = run_annotators(contents.store)
    cursors = _cursors(checkpoint)
    if not cursors.keys() <= logs.keys():
        return
    for path, cursor in cursors.items():
        log = logs[path]
        true = log.cursors[cursor.seq] if cursor.seq < len(log.cursors) else LogCursor()
        if cursor != true:
            raise LedgerMismatch(f"its cursor of {path} is {cursor}, but the stream's records give {true}")

    def committed(path: str) -> Amount:
        return Amount(rollouts=logs[path].head.rows, tokens=logs[path].head.tokens)

    generated, scored = Amount(), Amount()
    for generator in range(len(checkpoint.state["intake"])):
        generated += committed(layout.trajectories(generator))
        scored += amount_scored(
            sum((committed(layout.annotations(pool, generator, s, count)) for s in range(count)), Amount())
            for pool, count in pools.replicas.items()
        )
    account = Account.from_json(checkpoint.state["account"])
    consumed = consumed_by(checkpoint.state["intake"])
    account.balance(generated=generated, scored=scored, consumed=consumed)
    if layout.CONSUMED in logs:
        # Damage to the rows is reported with their files.
        with suppress(StreamCorrupt, PartRemoved):
            _check_consumed(read_consumed(contents.store), checkpoint.step, account)


def _cursors(checkpoint: Checkpoint) -> dict[str, LogCursor]:
    """Stream → the checkpoint's cursor in it."""
    cursors = {}
    for generator, stream in enumerate(checkpoint.state["intake"]):
        cursors[layout.trajectories(generator)] = LogCursor.from_json(stream["trajectories"])
        for pool, of_pool in stream["annotations"].items():
            for annotator, cursor in enumerate(of_pool):
                cursors[layout.annotations(pool, generator, annotator, len(of_pool))] = LogCursor.from_json(cursor)
    return cursors


def _check_consumed(rows: pa.Table, step: int, account: Account) -> None:
    """Compares the rows of `consumed` up to version `step` with the account. Raises LedgerMismatch."""
    if rows.num_rows == 0:
        return
    rows = rows.filter(pc.less_equal(rows["policy_version"], step))
    trained = rows.filter(pc.equal(rows["outcome"], TRAINED))
    by_staleness = {staleness: amount.rollouts for staleness, amount in _sums(trained, "staleness").items()}
    masked = trained["masked_tokens"].to_numpy()
    masked_amount = Amount(rollouts=int(np.count_nonzero(masked)), tokens=int(masked.sum()))
    compared: list[tuple[str, Mapping[Any, Any], Mapping[Any, Any]]] = [
        ("trajectories by outcome", _sums(rows, "outcome"), {TRAINED: account.trained} | account.dropped),
        ("trajectories by generator", _sums(rows, "generator"), account.by_generator),
        ("trained trajectories by staleness", by_staleness, dict(+account.staleness)),
        ("masked tokens", {TRAINED: masked_amount}, {TRAINED: account.masked}),
    ]
    for what, stored, counted in compared:
        for key in sorted({*stored, *counted}):
            if stored.get(key, Amount()) != counted.get(key, Amount()):
                raise LedgerMismatch(
                    f"{layout.CONSUMED} has {what} {key}: {stored.get(key, Amount())}, but its account has "
                    f"{counted.get(key, Amount())}"
                )


def _sums(rows: pa.Table, column: str) -> dict[Any, Amount]:
    """Trajectories and response tokens by the values of a column."""
    sums = rows.group_by(column).aggregate([("tokens", "count"), ("tokens", "sum")])
    return {row[column]: Amount(rollouts=row["tokens_count"], tokens=row["tokens_sum"]) for row in sums.to_pylist()}
