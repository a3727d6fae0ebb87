"""The latest checkpoint against the streams: its cursors must match them, and its account must match `consumed`.

records ─► true cursor at the same place ─┐
                                          ├─ equal? ─► consumed = trained + dropped ≤ scored ≤ generated?
checkpoint ─► its cursor ─────────────────┘
           ─► its account ───────────────────────────┐
                                                     ├─ equal? by outcome, by generator, by staleness; masked
║ consumed ║ ─► rows not rolled back, up to its version
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.errors import LedgerMismatch
from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.ledger import Account, Amount, balance
from millrace.rollouts.lineage import surviving
from millrace.rollouts.loader import consumed_by
from storage import layout
from storage.checkpoints import Checkpoint
from storage.errors import PartRemoved, StreamCorrupt
from storage.schema import CONSUMED
from storage.stores.base import Store
from storage.streams.log import LogCursor
from storage.streams.stream import StreamReader

_COLUMNS = ("incarnation", "policy_version", "generator", "outcome", "staleness", "tokens", "masked_tokens")


class CheckpointAudit:
    """A checkpoint, to compare with its run. Raises KeyError, TypeError or ValueError if its cursors can't be read."""

    def __init__(self, checkpoint: Checkpoint, reward: str) -> None:
        self._checkpoint = checkpoint
        self.cursors: dict[str, LogCursor] = {}
        """Stream → the checkpoint's cursor in it."""
        for generator, stream in enumerate(checkpoint.state["intake"]):
            self.cursors[layout.trajectories(generator)] = LogCursor.from_json(stream["trajectories"])
            for scorer, cursor in enumerate(stream["scores"]):
                path = layout.scores(reward, generator, scorer, len(stream["scores"]))
                self.cursors[path] = LogCursor.from_json(cursor)

    def check(self, store: Store, true_cursors: Mapping[str, LogCursor], heads: Mapping[str, LogCursor]) -> None:
        """Compares with the streams' own records: the cursors at the same places, and `heads`, the streams' ends.

        `heads` must have all streams of `cursors`. Raises LedgerMismatch; KeyError, TypeError or ValueError if the
        account can't be read.
        """
        for path, cursor in self.cursors.items():
            true = true_cursors.get(path, LogCursor())
            if cursor != true:
                raise LedgerMismatch(f"its cursor of {path} is {cursor}, but the stream's records give {true}")
        state = self._checkpoint.state
        account = Account.from_json(state["account"])
        balance(
            generated=_committed(heads[path] for path in self.cursors if path.startswith("streams/trajectories/")),
            scored=_committed(heads[path] for path in self.cursors if path.startswith("streams/scores/")),
            consumed=consumed_by(state["intake"]),
            account=account,
        )
        if layout.CONSUMED in heads:
            _check_consumed(store, self._checkpoint.step, account)


def _committed(heads: Iterable[LogCursor]) -> Amount:
    return sum((Amount(rollouts=head.rows, tokens=head.tokens) for head in heads), Amount())


def _check_consumed(store: Store, step: int, account: Account) -> None:
    """Compares the rows of the stream `consumed` up to version `step` with the account. Raises LedgerMismatch.

    Skips an unreadable stream: its damage is reported with its files.
    """
    try:
        reader = StreamReader(store, layout.CONSUMED, CONSUMED, columns=_COLUMNS)
        parts = [part.table for part in iter(reader.next, None)]
    except (StreamCorrupt, PartRemoved):
        return
    if not parts:
        return
    rows = pa.concat_tables(parts)
    versions = rows["policy_version"].to_numpy()
    rows = rows.filter(pa.array(surviving(rows["incarnation"].to_numpy(), versions) & (versions <= step)))
    _compare("trajectories by outcome", _sums(rows, "outcome"), {TRAINED: account.trained} | account.dropped)
    _compare("trajectories by generator", _sums(rows, "generator"), account.by_generator)
    trained = rows.filter(pc.equal(rows["outcome"], TRAINED))
    by_staleness = {staleness: amount.rollouts for staleness, amount in _sums(trained, "staleness").items()}
    _compare("trained trajectories by staleness", by_staleness, dict(+account.staleness))
    masked = trained["masked_tokens"].to_numpy()
    amount = Amount(rollouts=int(np.count_nonzero(masked)), tokens=int(masked.sum()))
    _compare("masked tokens", {TRAINED: amount}, {TRAINED: account.masked})


def _compare(what: str, stored: Mapping[Any, Any], account: Mapping[Any, Any]) -> None:
    for key in sorted({*stored, *account}):
        if (rows := stored.get(key, Amount())) != (counted := account.get(key, Amount())):
            raise LedgerMismatch(f"{layout.CONSUMED} has {what} {key}: {rows}, but its account has {counted}")


def _sums(rows: pa.Table, column: str) -> dict[Any, Amount]:
    """Trajectories and response tokens by the values of a column."""
    sums = rows.group_by(column).aggregate([("tokens", "count"), ("tokens", "sum")])
    return {
        row[column]: Amount(rollouts=row["tokens_count"], tokens=row["tokens_sum"])
        for row in sorted(sums.to_pylist(), key=lambda row: row[column])
    }
