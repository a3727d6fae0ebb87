"""The generators' work in flight, with a warning if some of it is too old to be trained."""

from collections.abc import Sequence

from dashboard.queries.stragglers import InFlight, in_flight
from dashboard.read.model import RunData
from dashboard.views.blocks import Rows, Table
from dashboard.views.per_run import rows_per_run
from millrace.runs.status import largest_and_bound

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
    by_run = {run.info.run_id: in_flight(run) for run in runs}
    notes = [_note(run, work) for run in runs for work in by_run[run.info.run_id] if work.loses_tokens]
    rows = rows_per_run(runs, _HEADER, lambda run: [_row(work) for work in by_run[run.info.run_id]])
    return Rows(header=rows.header, rows=rows.rows, verdict="bad" if notes else None, note=" ".join(notes))


def _note(run: RunData, work: InFlight) -> str:
    masked = run.info.config.get("staleness", {}).get("too_old") == "mask"
    consequence = "older tokens are masked" if masked else "the trainer drops older groups"
    return (
        f"{run.info.run_id}: the oldest group of generate-{work.generator} is {work.versions} policy versions old, "
        f"beyond the bound of {work.bound}: {consequence}."
    )


def _row(work: InFlight) -> tuple[str, ...]:
    return (
        f"generate-{work.generator}",
        _count(work.requests),
        _count(work.groups),
        _count(work.tokens),
        "–" if work.seconds is None else f"{work.seconds:,.1f}",
        "–" if work.versions is None else _versions(work),
        _count(work.continued),
        _count(work.discarded),
    )


def _versions(work: InFlight) -> str:
    return largest_and_bound(work.versions, work.bound, admission_only=work.admission_only)


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


IN_FLIGHT = Table(
    id="flow-in-flight",
    title="In flight",
    sentence="The work of each generator, and the age of its oldest group: the time since its admission, and the "
    "policy versions since its oldest weights. Continued tokens were taken over from an earlier process; discarded "
    "tokens were lost with one and generated again.",
    build=_table,
    wide=True,
    requires=lambda run: bool(in_flight(run)),
)
