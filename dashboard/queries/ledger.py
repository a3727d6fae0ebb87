"""Whether every trajectory is accounted for, and which were not trained on.

the trainer's account, in its status record ─┐
                                             ├─► compared by outcome and by generator
rows of the consumed stream, counted        ─┘
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dashboard.queries.learning import TRAINER
from dashboard.read.model import RunData
from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.ledger import Account, Amount

MOST_DROPS = 50
_SAME = ("policy_version", "generator", "group_id", "outcome", "staleness")
"""Columns that are equal in all rows of one Drop."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One amount in the account, and as counted from the rows of the consumed stream."""

    name: str
    """Outcome or generator."""
    account: Amount
    recount: Amount


@dataclass(frozen=True, kw_only=True)
class Recount:
    """The trainer's account beside a count of the rows."""

    policy_version: int
    """Both are as of this version."""
    behind: int
    """Steps that the consumed stream, committed once per second, does not have yet. While it is behind, a recount may
    be lower than the account."""
    entries: tuple[Entry, ...]

    @property
    def agrees(self) -> bool:
        """Whether both are equal; while the stream is behind, whether no recount exceeds the account."""
        return all(
            entry.account == entry.recount or (self.behind > 0 and _within(entry.recount, entry.account))
            for entry in self.entries
        )


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Adjacent rows of one group in a generator's stream that were dropped for one reason."""

    policy_version: int
    """Made by the step for which they were taken."""
    generator: int
    first_row: int
    last_row: int
    group: int
    """-1 if its part can't be read."""
    reason: str
    staleness: int
    """Policy versions."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Where the generated trajectories are, in four numbers."""

    generated: int
    trained: int
    waiting: int
    """To be scored, or for the trainer."""
    dropped: int
    is_balanced: bool
    """Whether the last three are the first, and the account agrees with the rows in the trainer's stream."""


def balance(run: RunData) -> Balance | None:
    """None if the trajectories can't be counted: see `RunData.problems`."""
    if run.status is None:
        return None
    ledger = run.status["ledger"]
    counted = recount(run)
    return Balance(
        generated=ledger["generated"]["rollouts"],
        trained=ledger["trained"]["rollouts"],
        waiting=ledger["buffered"]["rollouts"] + ledger["in_flight"]["rollouts"],
        dropped=sum(amount["rollouts"] for amount in ledger["dropped"].values()),
        is_balanced=sum_of_parts(ledger) == Amount.from_json(ledger["generated"])
        and (counted is None or counted.agrees),
    )


def sum_of_parts(ledger: Mapping[str, Any]) -> Amount:
    """What is trained, dropped and waiting, of the ledger in a status."""
    parts = [ledger["trained"], ledger["buffered"], ledger["in_flight"], *ledger["dropped"].values()]
    return sum((Amount.from_json(part) for part in parts), Amount())


def recount(run: RunData) -> Recount | None:
    """None until the trainer has written its first account."""
    status = run.stage_status.get(TRAINER, {})
    if "account" not in status:
        return None
    account, version = Account.from_json(status["account"]), int(status["policy_version"])
    versions = run.consumed["policy_version"]
    newest = int(versions[-1]) if len(versions) else 0
    # Versions ascend. The status record may be older than the stream.
    end = int(np.searchsorted(versions, version, side="right"))
    by_outcome = {run.outcomes[code]: amount for code, amount in _amounts(run, "outcome", end).items()}
    by_generator = _amounts(run, "generator", end)
    accounts = {TRAINED: account.trained, **account.dropped}
    generators = {f"generate-{generator}": generator for generator in sorted({*account.by_generator, *by_generator})}
    entries = [_entry(name, name, accounts, by_outcome) for name in dict.fromkeys([*accounts, *by_outcome])]
    entries += [_entry(name, generator, account.by_generator, by_generator) for name, generator in generators.items()]
    return Recount(policy_version=version, behind=max(0, version - newest), entries=tuple(entries))


def newest_drops(run: RunData) -> list[Drop]:
    """The last 50, newest first."""
    at = np.flatnonzero(~run.trained)
    columns = {name: run.consumed[name][at] for name in (*_SAME, "trajectory_row_id")}
    changed = np.diff(columns["trajectory_row_id"]) != 1
    for name in _SAME:
        changed |= np.diff(columns[name]) != 0
    starts = np.append(0, np.flatnonzero(changed) + 1)[-MOST_DROPS:] if len(at) else at
    ends = np.append(starts[1:], len(at))
    return [
        Drop(
            policy_version=int(columns["policy_version"][start]),
            generator=int(columns["generator"][start]),
            first_row=int(columns["trajectory_row_id"][start]),
            last_row=int(columns["trajectory_row_id"][end - 1]),
            group=int(columns["group_id"][start]),
            reason=run.outcomes[columns["outcome"][start]],
            staleness=int(columns["staleness"][start]),
        )
        for start, end in zip(starts, ends, strict=False)
    ][::-1]


def _entry(name: str, key: Any, accounts: Mapping[Any, Amount], recounts: Mapping[Any, Amount]) -> Entry:
    return Entry(name=name, account=accounts.get(key, Amount()), recount=recounts.get(key, Amount()))


def _amounts(run: RunData, column: str, end: int) -> dict[int, Amount]:
    """Trajectories and tokens of the first `end` rows, by the values of `column` that occur."""
    values, tokens = run.consumed[column][:end], run.consumed["tokens"][:end]
    rollouts, sums = np.bincount(values), np.bincount(values, tokens)
    return {value: Amount(rollouts=int(rollouts[value]), tokens=int(sums[value])) for value in np.flatnonzero(rollouts)}


def _within(part: Amount, whole: Amount) -> bool:
    return part.rollouts <= whole.rollouts and part.tokens <= whole.tokens
