"""Checks that every trajectory is accounted for, and lists dropped ones.

the trainer's account, in its status record ─┐
                                             ├─► compared by outcome, by generator and, of several sources, by source
rows of the consumed stream, counted        ─┘
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dashboard.queries.learning import TRAINER
from dashboard.read.model import RunData
from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.ledger import Account, Amount

MOST_DROPS = 50
_SAME = ("policy_version", "generator", "group_id", "source", "outcome", "staleness")
"""Columns with the same value in all rows of a Drop."""


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One amount in the trainer's account and in a recount of the consumed stream."""

    name: str
    """Outcome, generator, or outcome of a source."""
    account: Amount
    recount: Amount


@dataclass(frozen=True, kw_only=True)
class Recount:
    """The trainer's account compared with a count of the rows."""

    policy_version: int
    """Version up to which both count."""
    behind: int
    """Steps not yet in the consumed stream, which is committed once per second; until then, a recount may be lower."""
    entries: tuple[LedgerEntry, ...]

    @property
    def agrees(self) -> bool:
        """Whether the account equals the recount or, while the stream is behind, is not exceeded by it."""
        return all(
            entry.account == entry.recount
            or (
                self.behind > 0
                and entry.recount.rollouts <= entry.account.rollouts
                and entry.recount.tokens <= entry.account.tokens
            )
            for entry in self.entries
        )


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Adjacent rows of a group in a generator's stream that were dropped for the same reason."""

    policy_version: int
    """Version made by the step that took the rows."""
    generator: int
    first_row: int
    last_row: int
    group: int
    """Group id; -1 if its part can't be read."""
    source: str
    reason: str
    staleness: int
    """Policy versions."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Numbers of generated trajectories by their current place."""

    generated: int
    trained: int
    waiting: int
    """Waiting to be scored, or to be taken by the trainer."""
    dropped: int
    is_balanced: bool
    """Whether trained, waiting and dropped sum up to generated, and the account agrees with the recount."""


def balance(run: RunData) -> Balance | None:
    """Computes the balance; None if the trajectories can't be counted: see `RunData.problems`."""
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
    """Sums the trained, dropped and waiting amounts of a status's ledger."""
    parts = [ledger["trained"], ledger["buffered"], ledger["in_flight"], *ledger["dropped"].values()]
    return sum((Amount.from_json(part) for part in parts), Amount())


def recount(run: RunData) -> Recount | None:
    """Compares the account with the rows; None until the trainer has written its first account."""
    status = run.stage_status.get(TRAINER, {})
    if "account" not in status:
        return None
    account, version = Account.from_json(status["account"]), int(status["policy_version"])
    versions = run.consumed["policy_version"]
    newest = int(versions[-1]) if len(versions) else 0
    # The status record may be older than the stream.
    counted = versions <= version
    by_generator = _amounts(run, "generator", counted)
    generators = {f"generate-{generator}": generator for generator in sorted({*account.by_generator, *by_generator})}
    entries = _by_outcome(run, counted, {TRAINED: account.trained, **account.dropped})
    entries += [_entry(name, generator, account.by_generator, by_generator) for name, generator in generators.items()]
    for source, ledger in status.get("sources", {}).items():
        of_source = counted & (run.consumed["source"] == [*run.sources, source].index(source))
        amounts = {TRAINED: ledger["trained"], **ledger["dropped"]}
        accounts = {outcome: Amount.from_json(amount) for outcome, amount in amounts.items()}
        entries += _by_outcome(run, of_source, accounts, prefix=f"{source or 'damaged parts'}: ")
    return Recount(policy_version=version, behind=max(0, version - newest), entries=tuple(entries))


def newest_drops(run: RunData) -> list[Drop]:
    """Returns the last 50 drops, newest first."""
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
            source=run.sources[columns["source"][start]],
            reason=run.outcomes[columns["outcome"][start]],
            staleness=int(columns["staleness"][start]),
        )
        for start, end in zip(starts, ends, strict=False)
    ][::-1]


def _entry(name: str, key: Any, accounts: Mapping[Any, Amount], recounts: Mapping[Any, Amount]) -> LedgerEntry:
    return LedgerEntry(name=name, account=accounts.get(key, Amount()), recount=recounts.get(key, Amount()))


def _by_outcome(
    run: RunData, rows: npt.NDArray[np.bool_], accounts: Mapping[str, Amount], prefix: str = ""
) -> list[LedgerEntry]:
    recounts = {run.outcomes[code]: amount for code, amount in _amounts(run, "outcome", rows).items()}
    return [_entry(prefix + name, name, accounts, recounts) for name in dict.fromkeys([*accounts, *recounts])]


def _amounts(run: RunData, column: str, rows: npt.NDArray[np.bool_]) -> dict[int, Amount]:
    """Counts trajectories and tokens of `rows` by the values of `column`."""
    values, tokens = run.consumed[column][rows], run.consumed["tokens"][rows]
    rollouts, sums = np.bincount(values), np.bincount(values, tokens)
    return {value: Amount(rollouts=int(rollouts[value]), tokens=int(sums[value])) for value in np.flatnonzero(rollouts)}
