"""Differences between trained and taken responses: masked tokens, lengths and rewards."""

from collections.abc import Sequence

from dashboard.queries.learning import is_measured, measured
from dashboard.queries.stragglers import BAND, biased_length, biases
from dashboard.read.model import RunData
from dashboard.views.blocks import Chart, Rows, Table
from dashboard.views.colours import BLUE, ORANGE
from dashboard.views.figures import Series
from dashboard.views.per_run import VERSIONS, line_per_source, lines, number, rows_per_run
from millrace.rollouts.length_bias import STEPS

_HEADER = ("trained ÷ taken", "last step", "mean", "lowest", "highest", "steps outside the band")


def _ratios(run: RunData) -> list[Series]:
    return [
        Series(name="length", line=measured(run, "length_ratio"), colour=BLUE),
        Series(name="reward", line=measured(run, "reward_ratio"), colour=ORANGE, dash="dot"),
        *line_per_source([run], lambda of_source: measured(of_source, "length_ratio"), "length"),
    ]


def _masked(run: RunData) -> list[Series]:
    return [Series(name="masked", line=measured(run, "masked_token_share"), colour=BLUE)]


def _table(runs: Sequence[RunData]) -> Rows:
    notes = []
    for run in runs:
        if (ratio := biased_length(run)) is not None:
            kind = "shorter" if ratio < 1 else "longer"
            notes.append(
                f"{run.info.run_id}: trained responses are {kind} than all taken ones, {ratio:.3f} of their length, "
                f"outside {BAND[0]} to {BAND[1]}."
            )
    table = rows_per_run(runs, _HEADER, _rows)
    verdict = "bad" if notes else "good" if table.rows else None
    return Rows(header=table.header, rows=table.rows, verdict=verdict, note=" ".join(notes))


def _rows(run: RunData) -> list[tuple[str, ...]]:
    return [
        (
            f"{source}mean {bias.name}",
            number(bias.last, 3),
            number(bias.mean, 3),
            number(bias.lowest, 3),
            number(bias.highest, 3),
            f"{bias.outside:,} of {bias.steps:,}",
        )
        for source, part in {"": run, **{f"{name}: ": part for name, part in run.by_source.items()}}.items()
        for bias in biases(part)
    ]


def _has_ratio(run: RunData) -> bool:
    return is_measured(run, "length_ratio")


BLOCKS = (
    Chart(
        id="staleness-masked",
        title="Masked tokens",
        sentence="Share of the response tokens of the trained groups that were masked because they were older than the "
        "bound. If it exceeds a few percent, the bound is too small for the length of the responses.",
        build=lines(
            _masked, lambda run: measured(run, "masked_token_share"), x=VERSIONS, y="share of tokens", from_zero=True
        ),
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
        build=_table,
        wide=True,
        requires=_has_ratio,
    ),
)
