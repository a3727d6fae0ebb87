"""Whether every trajectory is accounted for."""

from collections.abc import Mapping, Sequence
from typing import Any

from dashboard.blocks import Rows, Table, View
from dashboard.data import RunData
from dashboard.queries import ledger as queries
from dashboard.views.several import rows_a_run
from millrace.ledger import Amount

_AMOUNTS = ("", "rollouts", "response tokens")
_TWICE = ("", "rollouts, account", "rollouts, recount", "tokens, account", "tokens, recount")
_DROPS = ("for version", "generator", "rows", "group", "reason", "staleness, versions")


def _balance(runs: Sequence[RunData]) -> Rows:
    unknown = [run for run in runs if run.status is None]
    table = rows_a_run(runs, _AMOUNTS, lambda run: [] if run.status is None else _parts(run.status["ledger"]))
    wrong = [run for run in runs if run.status is not None and not _adds_up(run.status["ledger"])]
    notes = [f"{run.facts.run_id}: {' '.join(run.problems) or 'its trajectories were not counted.'}" for run in unknown]
    notes += [f"{run.facts.run_id}: the parts do not add up to what was generated." for run in wrong]
    return Rows(
        header=table.header, rows=table.rows, verdict="bad" if unknown or wrong else "good", note=" ".join(notes)
    )


def _parts(ledger: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    dropped = {f"dropped: {reason}": amount for reason, amount in ledger["dropped"].items()}
    amounts = {
        "generated": ledger["generated"],
        "trained": ledger["trained"],
        **dropped,
        "buffered: scored, not taken": ledger["buffered"],
        "in flight: made, not scored": ledger["in_flight"],
        "these together": _sum(ledger).to_json(),
    }
    return [(name, f"{amount['rollouts']:,}", f"{amount['tokens']:,}") for name, amount in amounts.items()]


def _sum(ledger: Mapping[str, Any]) -> Amount:
    parts = [ledger["trained"], ledger["buffered"], ledger["in_flight"], *ledger["dropped"].values()]
    return sum((Amount.from_json(part) for part in parts), Amount())


def _adds_up(ledger: Mapping[str, Any]) -> bool:
    return _sum(ledger) == Amount.from_json(ledger["generated"])


def _told_twice(runs: Sequence[RunData]) -> Rows:
    told = {run.facts.run_id: queries.told_twice(run) for run in runs}
    table = rows_a_run(runs, _TWICE, lambda run: _entries(told[run.facts.run_id]))
    notes = [_as_of(found) if len(runs) == 1 else f"{run_id}: {_as_of(found)}" for run_id, found in told.items()]
    agree = all(found is None or found.agrees for found in told.values())
    return Rows(header=table.header, rows=table.rows, verdict="good" if agree else "bad", note=" ".join(notes))


def _entries(told: queries.ToldTwice | None) -> list[tuple[str, ...]]:
    if told is None:
        return []
    return [
        (
            entry.of,
            f"{entry.account.rollouts:,}",
            f"{entry.recount.rollouts:,}",
            f"{entry.account.tokens:,}",
            f"{entry.recount.tokens:,}",
        )
        for entry in told.entries
    ]


def _as_of(told: queries.ToldTwice | None) -> str:
    if told is None:
        return "The trainer has not said anything yet."
    if told.behind:
        return (
            f"The account is as of version {told.policy_version}; the rows of its last {told.behind} steps are still "
            "to be committed, so a recount may be short."
        )
    return f"Both as of version {told.policy_version}."


def _drops(runs: Sequence[RunData]) -> Rows:
    return rows_a_run(
        runs,
        _DROPS,
        lambda run: [
            (
                str(drop.policy_version),
                str(drop.generator),
                f"{drop.first_row} to {drop.last_row}",
                "unreadable" if drop.group < 0 else str(drop.group),
                drop.reason,
                str(drop.staleness),
            )
            for drop in queries.newest_drops(run)
        ],
    )


VIEW = View(
    name="ledger",
    title="Ledger",
    sentence="Where every trajectory went: nothing may be lost, and nothing counted twice.",
    blocks=(
        Table(
            id="ledger-balance",
            title="The balance",
            sentence="All that was generated is trained, dropped, waiting for the trainer or waiting to be scored.",
            build=_balance,
        ),
        Table(
            id="ledger-told-twice",
            title="Told twice",
            sentence="What the trainer's account says it took, beside a recount of the rows behind it.",
            build=_told_twice,
        ),
        Table(
            id="ledger-drops",
            title="Dropped groups",
            sentence=f"The last {queries.MOST_DROPS}, newest first: the rows of the generator's stream that were taken "
            "and not trained on.",
            build=_drops,
            wide=True,
        ),
    ),
)
