"""What the generators are working on, and whether it will be too old when it is done."""

from collections.abc import Sequence

from dashboard.queries.stragglers import InFlight, in_flight
from dashboard.read.model import RunData
from dashboard.views.blocks import Rows, Table
from dashboard.views.per_run import rows_per_run

_HEADER = (
    "generator",
    "requests",
    "groups",
    "response tokens",
    "age of the oldest group, s",
    "in versions, and the bound",
    "tokens continued",
    "tokens discarded",
)


def _table(runs: Sequence[RunData]) -> Rows:
    found = {run.info.run_id: in_flight(run) for run in runs}
    notes = [_note(run, one) for run in runs for one in found[run.info.run_id] if one.beyond_bound]
    rows = rows_per_run(runs, _HEADER, lambda run: [_row(one) for one in found[run.info.run_id]])
    return Rows(header=rows.header, rows=rows.rows, verdict="bad" if notes else None, note=" ".join(notes))


def _note(run: RunData, one: InFlight) -> str:
    masked = run.info.config.get("staleness", {}).get("too_old") == "mask"
    consequence = "tokens that are older carry no loss" if masked else "the trainer drops a group that is older"
    return (
        f"{run.info.run_id}: the oldest group of generate-{one.generator} is {one.versions} policy versions old, "
        f"beyond the bound of {one.bound}: {consequence}."
    )


def _row(one: InFlight) -> tuple[str, ...]:
    return (
        f"generate-{one.generator}",
        _count(one.requests),
        _count(one.groups),
        _count(one.tokens),
        "–" if one.seconds is None else f"{one.seconds:,.1f}",
        "–" if one.versions is None else f"{one.versions} of {one.bound}",
        _count(one.continued),
        _count(one.discarded),
    )


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


IN_FLIGHT = Table(
    id="flow-in-flight",
    title="In flight",
    sentence="What each generator is working on, and its oldest group: the time since it was admitted, and how far the "
    "trainer is ahead of its oldest weights. Continued are tokens taken over from an earlier process; discarded are "
    "tokens that were lost with one and had to be generated again.",
    build=_table,
    wide=True,
    requires=lambda run: bool(in_flight(run)),
)
