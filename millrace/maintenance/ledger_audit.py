"""The latest checkpoint against the streams: its cursors must match them, and its account must match `consumed`.

records ─► true cursor at the same place ─┐
                                          ├─ equal? ─► consumed = trained + dropped ≤ scored ≤ generated?
checkpoint ─► its cursor ─────────────────┘
           ─► its account ───────────────────────────┐
                                                     ├─ equal? by outcome, by generator, by staleness; masked
║ consumed ║ ─► rows not rolled back, up to its version
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.errors import LedgerMismatch
from millrace.maintenance.contents import StoredLog
from millrace.rollouts.consumed import TRAINED, read_consumed
from millrace.rollouts.ledger import Account, Amount, balance
from millrace.rollouts.loader import consumed_by
from storage import layout
from storage.checkpoints import Checkpoint
from storage.errors import PartRemoved, StreamCorrupt
from storage.stores.base import Store
from storage.streams.log import LogCursor


def cursors_of(checkpoint: Checkpoint, reward: str) -> dict[str, LogCursor]:
    """Stream → the checkpoint's cursor in it. Raises KeyError, TypeError or ValueError if they can't be read."""
    cursors = {}
    for generator, stream in enumerate(checkpoint.state["intake"]):
        cursors[layout.trajectories(generator)] = LogCursor.from_json(stream["trajectories"])
        for scorer, cursor in enumerate(stream["scores"]):
            path = layout.scores(reward, generator, scorer, len(stream["scores"]))
            cursors[path] = LogCursor.from_json(cursor)
    return cursors


def check_ledger(
    store: Store, checkpoint: Checkpoint, cursors: Mapping[str, LogCursor], logs: Mapping[str, StoredLog]
) -> None:
    """Compares a checkpoint and its `cursors` with `logs`, which must have all their streams.

    Raises LedgerMismatch; KeyError, TypeError or ValueError if the account can't be read.
    """
    amounts = {"trajectories": Amount(), "scores": Amount()}
    for path, cursor in cursors.items():
        log = logs[path]
        true = log.cursors[cursor.seq] if cursor.seq < len(log.cursors) else LogCursor()
        if cursor != true:
            raise LedgerMismatch(f"its cursor of {path} is {cursor}, but the stream's records give {true}")
        amounts[path.split("/")[1]] += Amount(rollouts=log.head.rows, tokens=log.head.tokens)
    state = checkpoint.state
    account = Account.from_json(state["account"])
    balance(
        generated=amounts["trajectories"],
        scored=amounts["scores"],
        consumed=consumed_by(state["intake"]),
        account=account,
    )
    if layout.CONSUMED in logs:
        _check_consumed(store, checkpoint.step, account)


def _check_consumed(store: Store, step: int, account: Account) -> None:
    """Compares the rows of `consumed` up to version `step` with the account. Raises LedgerMismatch."""
    try:
        rows = read_consumed(store)
    except (StreamCorrupt, PartRemoved):
        # The damage is reported with its files.
        return
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
