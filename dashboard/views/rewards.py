"""Charts of the learning page about responses: reward spread, reward components, length and truncation."""

from collections.abc import Sequence

import plotly.graph_objects as go

from dashboard.queries import rewards as queries
from dashboard.queries.learning import measured
from dashboard.queries.series import NO_LINE, ChartLine
from dashboard.read.model import RunData
from dashboard.views.blocks import Chart
from dashboard.views.colours import BLUE, GREY, ORANGE, SEQUENCE, SKY, VERMILION, colour_number
from dashboard.views.figures import Series, line_chart
from dashboard.views.per_run import VERSIONS, line_per_run, line_per_source, missing

SPREAD = {"mean": BLUE, "p10": SKY, "p50": GREY, "p90": ORANGE}
LENGTHS = {"p10": SKY, "p50": BLUE, "p90": ORANGE, "p99": VERMILION, "max": GREY}
_DASHES = ("solid", "dash", "dot")


def _spread(runs: Sequence[RunData]) -> go.Figure:
    def mean(run: RunData) -> ChartLine:
        return queries.reward_spread(run).get("mean", NO_LINE)

    if len(runs) > 1:
        series = line_per_run(runs, mean)
    else:
        spread = queries.reward_spread(runs[0])
        series = [Series(name=name, line=line, colour=SPREAD[name]) for name, line in spread.items()]
        series += line_per_source(runs, mean, "mean")
    return line_chart(series, x=VERSIONS, y="standard deviation of the reward", empty=missing(runs), from_zero=True)


def _lengths(runs: Sequence[RunData]) -> go.Figure:
    def p90(run: RunData) -> ChartLine:
        return queries.lengths(run).get("p90", NO_LINE)

    if len(runs) > 1:
        series = line_per_run(runs, p90)
    else:
        lengths = queries.lengths(runs[0])
        series = [Series(name=name, line=line, colour=LENGTHS[name]) for name, line in lengths.items()]
        series += line_per_source(runs, p90, "p90")
    return line_chart(series, x=VERSIONS, y="response tokens", empty=missing(runs), from_zero=True)


def _components(runs: Sequence[RunData]) -> go.Figure:
    by_run = [queries.components(run) for run in runs]
    names = sorted({name for lines in by_run for name in lines})
    if len(runs) > 1:
        series = [
            Series(
                name=f"{run.info.run_id}, {name}",
                line=lines[name],
                colour=colour_number(number),
                dash=_DASHES[names.index(name) % len(_DASHES)],
            )
            for number, (run, lines) in enumerate(zip(runs, by_run, strict=True))
            for name in lines
        ]
    else:
        series = [
            Series(
                name=name,
                line=line,
                colour=colour_number(number),
                dash=_DASHES[number // len(SEQUENCE) % len(_DASHES)],
            )
            for number, (name, line) in enumerate(by_run[0].items())
        ]
    return line_chart(series, x=VERSIONS, y="mean of the component", empty=missing(runs), from_zero=True)


def _truncated(runs: Sequence[RunData]) -> go.Figure:
    def share(run: RunData) -> ChartLine:
        return measured(run, "truncated_share")

    series = [*line_per_run(runs, share), *line_per_source(runs, share)]
    empty, legend = missing(runs), len(series) > 1
    return line_chart(series, x=VERSIONS, y="share of responses", empty=empty, from_zero=True, legend=legend)


BLOCKS = (
    Chart(
        id="learning-reward-spread",
        title="Reward spread",
        sentence="Standard deviation of the rewards within a group: mean and quantiles over the groups taken for each "
        "step, including dropped ones. A group at 0 teaches nothing. For several runs: the mean.",
        build=_spread,
    ),
    Chart(
        id="learning-reward-components",
        title="Components of the reward",
        sentence="Mean over the responses of each step of each component that the reward reports with its total.",
        build=_components,
    ),
    Chart(
        id="learning-lengths",
        title="Response length, quantiles",
        sentence="10 % of the responses taken for each step, including dropped ones, are no longer than p10, half no "
        "longer than p50, and so on. For several runs: p90.",
        build=_lengths,
    ),
    Chart(
        id="learning-truncated",
        title="Truncated responses",
        sentence="Share of each step's responses that were cut off by max_new_tokens or by the limit on turns.",
        build=_truncated,
    ),
)
