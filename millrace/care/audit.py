"""The latest checkpoint against the streams: do its cursors lie on them, and does its account tell the same story?

records ─► true cursor at the same place ─┐
                                          ├─ equal? ─► consumed = trained + dropped ≤ scored ≤ generated?
checkpoint ─► its cursor ─────────────────┘
           ─► its account ───────────────────────────┐
                                                     ├─ equal? by outcome, by generator, by staleness
║ consumed ║ ─► rows that hold, up to its version ───┘
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.care.contents import Shape
from millrace.consumed import TRAINED, holds, until
from millrace.errors import LedgerMismatch
from millrace.ledger import Account, Amount, balance
from storage import layout
from storage.errors import PartRemoved, StreamCorrupt
from storage.log import LogCursor
from storage.schema import CONSUMED
from storage.store import Store
from storage.stream import StreamReader

_COLUMNS = ("incarnation", "policy_version", "generator", "outcome", "staleness", "tokens")


def cursors_of(state: dict[str, Any], shape: Shape) -> dict[str, LogCursor]:
    """Stream → the cursor that a checkpoint has in it. Raises KeyError, TypeError or ValueError: no such state."""
    found = {}
    for generator, lane in enumerate(state["intake"]):
        found[layout.trajectories(generator)] = LogCursor.from_json(lane["trajectories"])
        for scorer, cursor in enumerate(lane["scores"]):
            path = layout.scores(shape.reward, generator, scorer, len(lane["scores"]))
            found[path] = LogCursor.from_json(cursor)
    return found


def check_cursors(cursors: Mapping[str, LogCursor], true_cursors: Mapping[str, LogCursor]) -> None:
    """`true_cursors` are those at the same places by the streams' own records. Raises LedgerMismatch."""
    for path, cursor in cursors.items():
        true = true_cursors.get(path, LogCursor())
        if cursor != true:
            raise LedgerMismatch(f"its cursor of {path} is {cursor}, but by the records before that place it is {true}")


def check_ledger(state: dict[str, Any], shape: Shape, heads: Mapping[str, LogCursor]) -> None:
    """`heads` are the ends of the streams. Raises LedgerMismatch; KeyError, TypeError or ValueError: no such state."""
    balance(
        generated=_committed(heads, shape.trajectories()),
        scored=_committed(heads, shape.scores()),
        consumed=[_consumed(lane) for lane in state["intake"]],
        account=Account.from_json(state["account"]),
    )


def check_told(store: Store, step: int, state: dict[str, Any]) -> None:
    """The stream `consumed` tells row by row what the account of the checkpoint of version `step` sums up.

    A run that was begun before this stream existed is not judged, and neither is a stream that can't be read: whoever
    verifies its files tells of that. Raises LedgerMismatch, and as `check_ledger` does.
    """
    account = Account.from_json(state["account"])
    try:
        reader = StreamReader(store, layout.CONSUMED, CONSUMED, columns=_COLUMNS)
        parts = [part.table for part in iter(reader.next, None)]
    except (StreamCorrupt, PartRemoved):
        return
    if not parts:
        return
    rows = pa.concat_tables(parts)
    versions = rows["policy_version"].to_numpy()
    if versions[0] > 1:
        return
    incarnations = rows["incarnation"].to_numpy()
    told = rows.filter(pa.array(holds(incarnations, versions, until(incarnations, versions)) & (versions <= step)))
    _compare("of outcome", _sums(told, "outcome"), {TRAINED: account.trained} | account.dropped)
    _compare("of generator", _sums(told, "generator"), account.by_generator)
    trained = _sums(told.filter(pc.equal(told["outcome"], TRAINED)), "staleness")
    by_staleness = {staleness: amount.rollouts for staleness, amount in trained.items()}
    if by_staleness != dict(+account.staleness):
        raise LedgerMismatch(
            f"{layout.CONSUMED} tells of trained rollouts by staleness {by_staleness}, "
            f"but its account has {dict(+account.staleness)}"
        )


def _compare(what: str, told: Mapping[Any, Amount], account: Mapping[Any, Amount]) -> None:
    for key in sorted({*told, *account}):
        rows, has = told.get(key, Amount()), account.get(key, Amount())
        if rows != has:
            raise LedgerMismatch(
                f"{layout.CONSUMED} tells of {rows.rollouts} rollouts ({rows.tokens} tokens) {what} {key}, "
                f"but its account has {has.rollouts} ({has.tokens})"
            )


def _sums(rows: pa.Table, column: str) -> dict[Any, Amount]:
    """Rollouts and response tokens by the values of a column."""
    sums = rows.group_by(column).aggregate([("tokens", "count"), ("tokens", "sum")])
    return {
        row[column]: Amount(rollouts=row["tokens_count"], tokens=row["tokens_sum"])
        for row in sorted(sums.to_pylist(), key=lambda row: row[column])
    }


def _committed(heads: Mapping[str, LogCursor], streams: Iterable[str]) -> Amount:
    ends = [heads.get(path, LogCursor()) for path in streams]
    return Amount(rollouts=sum(end.rows for end in ends), tokens=sum(end.tokens for end in ends))


def _consumed(lane: dict[str, Any]) -> Amount:
    """What the trainer took of one generator's rows: whole parts, by the cursor, and the beginning of the next one."""
    cursor = LogCursor.from_json(lane["trajectories"])
    return Amount(rollouts=cursor.rows, tokens=cursor.tokens) + Amount.from_json(lane["taken"])
