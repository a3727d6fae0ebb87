"""Work in flight, and differences between trained and taken responses: masked tokens, lengths and rewards."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dashboard.queries.series import TRAINER, is_measured, measured, metric
from dashboard.queries.stragglers import BAND, biased_length, in_flight
from dashboard.read.model import RunData
from dashboard.views.blocks import VERSIONS, Chart, Rows, Table, line_per_source, lines, number, rows_per_run
from dashboard.views.colours import BLUE, ORANGE
from dashboard.views.figures import Series
from millrace.rollouts.length_bias import STEPS
from millrace.runs.status import largest_and_bound

_IN_FLIGHT = (
    "generator",
    "requests",
    "groups",
    "response tokens",
    "age of the oldest group, s",
    "in versions, and the bound",
    "tokens continued",
    "tokens discarded",
)
_BIAS = ("trained ÷ taken", "last step", "mean", "lowest", "highest", "steps outside the band")


def _work(runs: Sequence[RunData]) -> Rows:
    rows = rows_per_run(runs, _IN_FLIGHT, _work_rows)
    notes = [
        f"{run.info.run_id}: the oldest group of generate-{work.generator} is {work.versions} policy versions old, "
        f"beyond the bound of {run.info.max_staleness}: {_consequence(run)}."
        for run in runs
        for work in in_flight(run)
        if work.loses_tokens
    ]
    return replace(rows, verdict="bad" if notes else None, note=" ".join(notes))


def _consequence(run: RunData) -> str:
    masked = run.info.config.get("staleness", {}).get("too_old") == "mask"
    return "older tokens are masked" if masked else "the trainer drops older groups"


def _work_rows(run: RunData) -> list[tuple[str, ...]]:
    bound, admission_only = run.info.max_staleness, run.info.bounds_admission_only
    return [
        (
            f"generate-{work.generator}",
            _count(work.requests),
            _count(work.groups),
            _count(work.tokens),
            "–" if work.seconds is None else f"{work.seconds:,.1f}",
            "–" if work.versions is None else largest_and_bound(work.versions, bound, admission_only=admission_only),
            _count(work.continued),
            _count(work.discarded),
        )
        for work in in_flight(run)
    ]


def _count(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def _bias(runs: Sequence[RunData]) -> Rows:
    rows = rows_per_run(runs, _BIAS, _bias_rows)
    notes = [
        f"{run.info.run_id}: trained responses are {'shorter' if ratio < 1 else 'longer'} than all taken ones, "
        f"{ratio:.3f} of their length, outside {BAND[0]} to {BAND[1]}."
        for run in runs
        if (ratio := biased_length(run)) is not None
    ]
    return replace(rows, verdict="bad" if notes else "good" if rows.rows else None, note=" ".join(notes))


def _bias_rows(run: RunData) -> list[tuple[str, ...]]:
    """Returns a row for each mean over trained responses divided by that over all taken ones: 1 without bias."""
    rows = []
    for source, part in {"": run, **{f"{name}: ": part for name, part in run.by_source.items()}}.items():
        for name in ("length", "reward"):
            ratios = metric(part, TRAINER, f"{name}_ratio")["value"]
            finite = ratios[np.isfinite(ratios)]
            if len(finite):
                outside = np.count_nonzero((finite < BAND[0]) | (finite > BAND[1]))
                figures = (number(value, 3) for value in (ratios[-1], finite.mean(), finite.min(), finite.max()))
                rows.append((f"{source}mean {name}", *figures, f"{outside:,} of {len(finite):,}"))
    return rows


def _ratios(run: RunData) -> list[Series]:
    return [
        Series(name="length", line=measured(run, "length_ratio"), colour=BLUE),
        Series(name="reward", line=measured(run, "reward_ratio"), colour=ORANGE, dash="dot"),
        *line_per_source([run], lambda of_source: measured(of_source, "length_ratio"), "length"),
    ]


def _masked(run: RunData) -> list[Series]:
    return [Series(name="masked", line=measured(run, "masked_token_share"), colour=BLUE)]


def _has_ratio(run: RunData) -> bool:
    return is_measured(run, "length_ratio")


IN_FLIGHT = Table(
    id="flow-in-flight",
    title="In flight",
    sentence="The work of each generator, and the age of its oldest group: the time since its admission, and the "
    "policy versions since its oldest weights. Continued tokens were taken over from an earlier process; discarded "
    "tokens were lost with one and generated again.",
    build=_work,
    wide=True,
    requires=lambda run: bool(in_flight(run)),
)
BLOCKS = (
    Chart(
        id="staleness-masked",
        title="Masked tokens",
        sentence="Share of the response tokens of the trained groups that were masked because they were older than the "
        "bound. If it exceeds a few percent, the bound is too small for the length of the responses.",
        build=lines(_masked, lambda run: measured(run, "masked_token_share"), x=VERSIONS, y="share of tokens"),
        requires=lambda run: is_measured(run, "masked_token_share"),
    ),
    Chart(
        id="staleness-ratios",
        title="Length and reward, trained ÷ taken",
        sentence=f"Means over the trained responses of the last {STEPS} steps, divided by those over all taken ones. "
        f"Outside the band, {BAND[0]} to {BAND[1]}, the policy learns from shorter or longer responses than it "
        "generates: use mask, or a larger bound. For several runs: the length.",
        build=lines(
            _ratios,
            lambda run: measured(run, "length_ratio"),
            x=VERSIONS,
            y="trained ÷ taken",
            from_zero=False,
            band=BAND,
        ),
        requires=_has_ratio,
    ),
    Table(
        id="staleness-bias",
        title="Length bias",
        sentence="The same ratios as numbers. Dropping favours short responses where the length is below the band, and "
        "long ones where it is above.",
        build=_bias,
        wide=True,
        requires=_has_ratio,
    ),
)
