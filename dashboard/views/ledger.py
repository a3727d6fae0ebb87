"""The ledger page: a check that every trajectory is accounted for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dashboard.queries import ledger as queries
from dashboard.read.model import RunData
from dashboard.views.blocks import Rows, Table, View
from dashboard.views.per_run import rows_per_run
from millrace.rollouts.ledger import Amount

_AMOUNTS = ("", "rollouts", "response tokens")
_RECOUNT = ("", "rollouts, account", "rollouts, recount", "tokens, account", "tokens, recount")
_DROPS = ("for version", "generator", "rows", "group", "reason", "staleness, versions")


def _balance(runs: Sequence[RunData]) -> Rows:
    notes = []
    for run in runs:
        if run.status is None:
            notes.append(f"{run.info.run_id}: {' '.join(run.problems) or 'its trajectories were not counted.'}")
        elif queries.sum_of_parts(run.status["ledger"]) != Amount.from_json(run.status["ledger"]["generated"]):
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
        "sum of the parts": queries.sum_of_parts(ledger).to_json(),
        "of the trained: masked, too old": ledger.get("masked", {}),
        "generated twice": ledger.get("generated_twice", {}),
    }
    return [
        (name, *(f"{amount[unit]:,}" if unit in amount else "–" for unit in ("rollouts", "tokens")))
        for name, amount in amounts.items()
    ]


def _recount(runs: Sequence[RunData]) -> Rows:
    recounts = {run.info.run_id: queries.recount(run) for run in runs}
    table = rows_per_run(runs, _RECOUNT, lambda run: _entries(recounts[run.info.run_id]))
    notes = [
        _as_of(recount) if len(runs) == 1 else f"{run_id}: {_as_of(recount)}" for run_id, recount in recounts.items()
    ]
    agree = all(recount is None or recount.agrees for recount in recounts.values())
    return replace(table, verdict="good" if agree else "bad", note=" ".join(notes))


def _entries(recount: queries.Recount | None) -> list[tuple[str, ...]]:
    return [
        (
            entry.name,
            f"{entry.account.rollouts:,}",
            f"{entry.recount.rollouts:,}",
            f"{entry.account.tokens:,}",
            f"{entry.recount.tokens:,}",
        )
        for entry in (recount.entries if recount else ())
    ]


def _as_of(recount: queries.Recount | None) -> str:
    if recount is None:
        return "The trainer has not written an account yet."
    if recount.behind:
        return (
            f"The account is at version {recount.policy_version}; the rows of its last {recount.behind} steps are "
            "not committed yet, so the recount may be lower."
        )
    return f"Both at version {recount.policy_version}."


def _drops(run: RunData) -> list[tuple[str, ...]]:
    return [
        (
            str(drop.policy_version),
            str(drop.generator),
            f"{drop.first_row} to {drop.last_row}",
            "unreadable" if drop.group < 0 else f"{drop.group}, {drop.source}" if run.by_source else str(drop.group),
            drop.reason,
            str(drop.staleness),
        )
        for drop in queries.newest_drops(run)
    ]


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
            sentence=f"The last {queries.MOST_DROPS}, newest first: rows of the generator's stream that were taken "
            "but not trained.",
            build=lambda runs: rows_per_run(runs, _DROPS, _drops),
            wide=True,
        ),
    ),
)
