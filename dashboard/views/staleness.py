"""How stale the trained trajectories are, where that comes from, and what the bound costs."""

from collections.abc import Sequence

import plotly.graph_objects as go

from dashboard.blocks import Chart, Rows, Table, View
from dashboard.colours import BLUE, GREY, SEQUENCE, SKY, VERMILION, colour_number, colour_of
from dashboard.data import RunData
from dashboard.figures import Heat, Series, area_chart, bar_chart, heat_maps, line_chart
from dashboard.queries import staleness as queries
from dashboard.queries.series import Line
from dashboard.views.several import NO_STEP, VERSIONS, line_a_run, number, rows_a_run

_STALENESS = "staleness, policy versions"
_OUTCOMES = ("outcome", "rollouts", "response tokens", "mean length, tokens", "÷ trained", "mean reward")


def _over_time(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, lambda run: queries.over_time(run)[0])
    else:
        mean, largest = queries.over_time(runs[0])
        bound = queries.bound(runs[0]) if len(mean.x) else Line(mean.x, mean.y)
        series = [
            Series(name="mean", x=mean.x, y=mean.y, colour=BLUE),
            Series(name="largest", x=largest.x, y=largest.y, colour=SKY, dash="dot"),
            Series(name="bound", x=bound.x, y=bound.y, colour=VERMILION, dash="dash", stepped=True),
        ]
    return line_chart(series, x=VERSIONS, y=_STALENESS, empty=NO_STEP, from_zero=True)


def _split(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, lambda run: queries.split(run)[1])
        return line_chart(series, x=VERSIONS, y="staleness from queues, versions", empty=NO_STEP, from_zero=True)
    series = [
        Series(name=name, x=line.x, y=line.y, colour=colour_of(name))
        for name, line in zip(("in flight", "in queues"), queries.split(runs[0]), strict=True)
    ]
    return area_chart(series, x=VERSIONS, y="mean staleness, versions", empty=NO_STEP)


def _distribution(runs: Sequence[RunData]) -> go.Figure:
    series = []
    for place, run in enumerate(runs):
        found = queries.distribution(run)
        if found is None:
            continue
        name = "newest tenth" if len(runs) == 1 else run.facts.run_id
        series.append(Series(name=name, x=found.staleness, y=found.recent, colour=colour_number(place)))
        if len(runs) == 1:
            series.append(Series(name="whole run", x=found.staleness, y=found.whole, colour=GREY))
    return bar_chart(series, x=_STALENESS, y="share of trajectories", empty=NO_STEP)


def _pairs(runs: Sequence[RunData]) -> go.Figure:
    heats = [
        Heat(name=run.facts.run_id, x=found.trained, y=found.behaviour, counts=found.counts)
        for run in runs
        if (found := queries.pairs(run)) is not None
    ]
    return heat_maps(heats, x="trained version", y="behaviour version", unit="trajectories", empty=NO_STEP)


def _by_generator(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, lambda run: queries.over_time(run)[0])
    else:
        series = [
            Series(name=f"generate-{generator}", x=line.x, y=line.y, colour=colour_number(generator))
            for generator, line in queries.by_generator(runs[0]).items()
        ]
    return line_chart(series, x=VERSIONS, y="mean staleness, versions", empty=NO_STEP, from_zero=True)


def _spans(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, queries.mean_span)
        return line_chart(series, x=VERSIONS, y="versions per trajectory, mean", empty=NO_STEP)
    series = [
        Series(name=_versions(spanned), x=line.x, y=line.y, colour=SEQUENCE[spanned - 1])
        for spanned, line in queries.spans(runs[0]).items()
        if line.y.any()
    ]
    return area_chart(series, x=VERSIONS, y="share of trajectories", empty=NO_STEP, whole=1.0)


def _versions(spanned: int) -> str:
    if spanned == queries.MOST_SPANS:
        return f"{spanned} versions or more"
    return "1 version" if spanned == 1 else f"{spanned} versions"


def _outcomes(runs: Sequence[RunData]) -> Rows:
    return rows_a_run(
        runs,
        _OUTCOMES,
        lambda run: [
            (
                one.name,
                f"{one.rollouts:,}",
                f"{one.tokens:,}",
                number(one.mean_length),
                number(one.length_ratio),
                number(one.mean_reward, 3),
            )
            for one in queries.outcomes(run)
        ],
    )


VIEW = View(
    name="staleness",
    title="Staleness",
    sentence="How many policy versions lie between the weights that sampled a trajectory and those that it trained.",
    blocks=(
        Chart(
            id="staleness-over-time",
            title="Staleness over time",
            sentence="Of the trajectories trained at each step, the mean and the largest, below the bound in force. Of "
            "several runs: the mean.",
            build=_over_time,
            wide=True,
        ),
        Chart(
            id="staleness-split",
            title="Where it comes from",
            sentence="What came about while trajectories were being sampled, and what while they lay in queues; "
            "together the mean. Of several runs: the part from queues.",
            build=_split,
        ),
        Chart(
            id="staleness-distribution",
            title="Distribution now",
            sentence="Share of trajectories by their staleness: the newest tenth of those trained, beside the whole "
            "run. Of several runs: the newest tenth.",
            build=_distribution,
        ),
        Chart(
            id="staleness-pairs",
            title="Sampled by, trained at",
            sentence="The newest 120 versions: how many trajectories whose oldest token one version sampled were "
            "trained at which later one. The farther below the diagonal, the staler.",
            build=_pairs,
        ),
        Chart(
            id="staleness-by-generator",
            title="By generator",
            sentence="Mean staleness of what each generator made: one that lags behind the others stands out. Of "
            "several runs: the mean of all generators.",
            build=_by_generator,
        ),
        Chart(
            id="staleness-spans",
            title="Versions in one trajectory",
            sentence="Share of trajectories by how many policy versions sampled their tokens, since weights change in "
            "the middle of a response. Of several runs: the mean number of versions.",
            build=_spans,
        ),
        Table(
            id="staleness-outcomes",
            title="Trained and dropped",
            sentence="What the trainer took, by what became of it. A mean length that differs from that of the trained "
            "ones means that dropping favours long or short responses.",
            build=_outcomes,
        ),
    ),
)
