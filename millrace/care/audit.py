"""The latest checkpoint against the streams: do its cursors lie on them, and does its account tell the same story?

records ─► true cursor at the same place ─┐
                                          ├─ equal? ─► consumed = trained + dropped ≤ scored ≤ generated?
checkpoint ─► its cursor ─────────────────┘
"""

from collections.abc import Iterable, Mapping
from typing import Any

from millrace.care.contents import Shape
from millrace.errors import LedgerMismatch
from millrace.ledger import Account, Amount, balance
from storage import layout
from storage.log import LogCursor


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


def _committed(heads: Mapping[str, LogCursor], streams: Iterable[str]) -> Amount:
    ends = [heads.get(path, LogCursor()) for path in streams]
    return Amount(rollouts=sum(end.rows for end in ends), tokens=sum(end.tokens for end in ends))


def _consumed(lane: dict[str, Any]) -> Amount:
    """What the trainer took of one generator's rows: whole parts, by the cursor, and the beginning of the next one."""
    cursor = LogCursor.from_json(lane["trajectories"])
    return Amount(rollouts=cursor.rows, tokens=cursor.tokens) + Amount.from_json(lane["taken"])
