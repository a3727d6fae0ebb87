"""The ledger page: a check that every trajectory is accounted for.

the trainer's account, in its status record ─┐
                                             ├─► compared by outcome, by generator and, of several sources, by source
rows of the consumed stream, counted        ─┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dashboard.queries.series import TRAINER
from dashboard.read.model import RunData
from dashboard.views.blocks import Rows, Table, View, rows_per_run
from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.ledger import Account, Amount

MOST_DROPS = 50
_SAME = ("policy_version", "generator", "group_id", "source", "outcome", "staleness")
"""Columns with the same value in all rows of a dropped group."""
_AMOUNTS = ("", "rollouts", "response tokens")
_RECOUNT = ("", "rollouts, account", "rollouts, recount", "tokens, account", "tokens, recount")
_DROPS = ("for version", "generator", "rows", "group", "reason", "staleness, versions")


@dataclass(frozen=True, kw_only=True)
class Recount:
    """The trainer's account compared with a count of the rows."""

    policy_version: int
    """Version up to which both count."""
    behind: int
    """Steps not yet in the consumed stream, which is committed once per second; until then, a recount may be lower."""
    entries: Mapping[str, tuple[Amount, Amount]]
    """Outcome, generator, or outcome of a source → its amount in the account, and in the recount."""

    @property
    def agrees(self) -> bool:
        """Whether the account equals the recount or, while the stream is behind, is not exceeded by it."""
        return all(
            account == rows or (self.behind > 0 and rows.rollouts <= account.rollouts and rows.tokens <= account.tokens)
            for account, rows in self.entries.values()
        )


def is_balanced(ledger: Mapping[str, Any]) -> bool:
    """Whether the parts of a status's ledger add up; the account behind it was compared with the streams' records."""
    return sum_of_parts(ledger) == Amount.from_json(ledger["generated"])


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
    entries = _by_outcome(run, counted, {TRAINED: account.trained, **account.dropped})
    by_generator = _amounts(run, "generator", counted)
    for generator in sorted({*account.by_generator, *by_generator}):
        pair = account.by_generator.get(generator, Amount()), by_generator.get(generator, Amount())
        entries[f"generate-{generator}"] = pair
    for source, ledger in status.get("sources", {}).items():
        of_source = counted & (run.consumed["source"] == [*run.consumed.sources, source].index(source))
        amounts = {TRAINED: ledger["trained"], **ledger["dropped"]}
        accounts = {outcome: Amount.from_json(amount) for outcome, amount in amounts.items()}
        entries |= _by_outcome(run, of_source, accounts, prefix=f"{source or 'damaged parts'}: ")
    return Recount(policy_version=version, behind=max(0, version - newest), entries=entries)


def _by_outcome(
    run: RunData, rows: npt.NDArray[np.bool_], accounts: Mapping[str, Amount], prefix: str = ""
) -> dict[str, tuple[Amount, Amount]]:
    recounts = {run.consumed.outcomes[code]: amount for code, amount in _amounts(run, "outcome", rows).items()}
    names = dict.fromkeys([*accounts, *recounts])
    return {prefix + name: (accounts.get(name, Amount()), recounts.get(name, Amount())) for name in names}


def _amounts(run: RunData, column: str, rows: npt.NDArray[np.bool_]) -> dict[int, Amount]:
    """Counts trajectories and tokens of `rows` by the values of `column`."""
    values, tokens = run.consumed[column][rows], run.consumed["tokens"][rows]
    rollouts, sums = np.bincount(values), np.bincount(values, tokens)
    return {value: Amount(rollouts=int(rollouts[value]), tokens=int(sums[value])) for value in np.flatnonzero(rollouts)}


def _balance(runs: Sequence[RunData]) -> Rows:
    notes = []
    for run in runs:
        if run.status is None:
            notes.append(f"{run.info.run_id}: {' '.join(run.problems) or 'its trajectories were not counted.'}")
        elif not is_balanced(run.status["ledger"]):
            notes.append(f"{run.info.run_id}: the parts do not add up to the generated amount.")
    table = rows_per_run(runs, _AMOUNTS, lambda run: [] if run.status is None else _parts(run.status["ledger"]))
    return replace(table, verdict="bad" if notes else "good", note=" ".join(notes))


def _parts(ledger: Mapping[str, Any]) -> list[tuple[str, ...]]:
    dropped = {f"dropped: {reason}": amount for reason, amount in ledger["dropped"].items()}
    amounts = {
        "generated": ledger["generated"],
        "trained": ledger["trained"],
        **dropped,
        "buffered: scored, not taken": ledger["buffered"],
        "in flight: made, not scored": ledger["in_flight"],
        "sum of the parts": sum_of_parts(ledger).to_json(),
        "of the trained: masked, too old": ledger.get("masked", {}),
        "generated twice": ledger.get("generated_twice", {}),
    }
    return [
        (name, *(f"{amount[unit]:,}" if unit in amount else "–" for unit in ("rollouts", "tokens")))
        for name, amount in amounts.items()
    ]


def _recount(runs: Sequence[RunData]) -> Rows:
    recounts = {run.info.run_id: recount(run) for run in runs}
    table = rows_per_run(runs, _RECOUNT, lambda run: _entries(recounts[run.info.run_id]))
    notes = [_as_of(result) if len(runs) == 1 else f"{run_id}: {_as_of(result)}" for run_id, result in recounts.items()]
    agree = all(result is None or result.agrees for result in recounts.values())
    return replace(table, verdict="good" if agree else "bad", note=" ".join(notes))


def _entries(result: Recount | None) -> list[tuple[str, ...]]:
    return [
        (name, *(f"{number:,}" for number in (account.rollouts, rows.rollouts, account.tokens, rows.tokens)))
        for name, (account, rows) in (result.entries if result else {}).items()
    ]


def _as_of(result: Recount | None) -> str:
    if result is None:
        return "The trainer has not written an account yet."
    if result.behind:
        return (
            f"The account is at version {result.policy_version}; the rows of its last {result.behind} steps are "
            "not committed yet, so the recount may be lower."
        )
    return f"Both at version {result.policy_version}."


def newest_drops(run: RunData) -> list[tuple[str, ...]]:
    """Returns the last 50 drops, newest first: adjacent rows of a group that were dropped for the same reason."""
    at = np.flatnonzero(~run.trained)
    columns = {name: run.consumed[name][at] for name in (*_SAME, "trajectory_row_id")}
    changed = np.diff(columns["trajectory_row_id"]) != 1
    for name in _SAME:
        changed |= np.diff(columns[name]) != 0
    starts = np.append(0, np.flatnonzero(changed) + 1)[-MOST_DROPS:] if len(at) else at
    rows = list[tuple[str, ...]]()
    for start, end in zip(starts, np.append(starts[1:], len(at)), strict=False):
        first = {name: column[start] for name, column in columns.items()}
        group = "unreadable" if first["group_id"] < 0 else str(first["group_id"])
        if run.by_source and first["group_id"] >= 0:
            group += f", {run.consumed.sources[first['source']]}"
        rows.append(
            (
                str(first["policy_version"]),
                str(first["generator"]),
                f"{first['trajectory_row_id']} to {columns['trajectory_row_id'][end - 1]}",
                f"{group}, {run.consumed.sources[first['source']]}"
                if run.by_source and first["group_id"] >= 0
                else group,
                run.consumed.outcomes[first["outcome"]],
                str(first["staleness"]),
            )
        )
    return rows[::-1]


VIEW = View(
    name="ledger",
    title="Ledger",
    sentence="The outcome of every trajectory: none may be lost or counted twice.",
    blocks=(
        Table(
            id="ledger-balance",
            title="The balance",
            sentence="Every generated trajectory is trained, dropped, waiting for the trainer or waiting to be scored.",
            build=_balance,
        ),
        Table(
            id="ledger-recount",
            title="Account and recount",
            sentence="The amounts in the trainer's account, and a count of the stored rows.",
            build=_recount,
        ),
        Table(
            id="ledger-drops",
            title="Dropped groups",
            sentence=f"The last {MOST_DROPS}, newest first: rows of the generator's stream that were taken but not "
            "trained.",
            build=lambda runs: rows_per_run(runs, _DROPS, newest_drops),
            wide=True,
        ),
    ),
)
