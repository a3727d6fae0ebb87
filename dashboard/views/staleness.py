"""The staleness page: staleness of the trained trajectories, its sources, and the cost of the bound."""

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go

from dashboard.queries import staleness as queries
from dashboard.queries.series import ChartLine
from dashboard.read.model import RunData
from dashboard.views import stragglers
from dashboard.views.blocks import (
    VERSIONS,
    Build,
    Chart,
    Table,
    View,
    line_per_run,
    line_per_source,
    lines,
    missing,
    number,
    rows_per_run,
)
from dashboard.views.colours import BLUE, GREY, SEQUENCE, SKY, colour_number, colour_of
from dashboard.views.figures import Series, area_chart, bar_chart, heat_maps, line_chart
from millrace.rollouts.consumed import TRAINED

_STALENESS = "staleness, policy versions"
_DECISIONS = ("version", "decision", "bound", "reason")
_OUTCOMES = ("outcome", "rollouts", "response tokens", "mean length, tokens", "÷ trained", "mean reward")


def over_time(run: RunData) -> list[Series]:
    """Returns mean, largest and bound, and the mean of each source."""
    mean, largest = queries.over_time(run)
    bound = "bound at admission" if run.info.bounds_admission_only else "bound"
    return [
        Series(name="mean", line=mean, colour=BLUE),
        Series(name="largest", line=largest, colour=SKY, dash="dot"),
        Series(name=bound, line=queries.bound(run), colour=GREY, dash="dash", stepped=True),
        *line_per_source([run], _mean, "mean"),
    ]


def _mean(run: RunData) -> ChartLine:
    return queries.over_time(run)[0]


def _split(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_per_run(runs, lambda run: queries.split(run)[1])
        return line_chart(series, x=VERSIONS, y="staleness from queues, versions", empty=missing(runs), from_zero=True)
    series = [
        Series(name=name, line=line, colour=colour_of(name))
        for name, line in zip(("in flight", "in queues"), queries.split(runs[0]), strict=True)
    ]
    return area_chart(series, x=VERSIONS, y="mean staleness, versions", empty=missing(runs))


def _distribution(of: Callable[[RunData], tuple[ChartLine, ChartLine] | None], y: str) -> Build:
    """Builds bars of the newest tenth and of the whole run; for several runs, of the newest tenth of each."""

    def build(runs: Sequence[RunData]) -> go.Figure:
        series = []
        for index, run in enumerate(runs):
            if (distribution := of(run)) is None:
                continue
            recent, whole = distribution
            name = "newest tenth" if len(runs) == 1 else run.info.run_id
            series.append(Series(name=name, line=recent, colour=colour_number(index)))
            if len(runs) == 1:
                series.append(Series(name="whole run", line=whole, colour=GREY))
        return bar_chart(series, x=_STALENESS, y=y, empty=missing(runs))

    return build


def _pairs(runs: Sequence[RunData]) -> go.Figure:
    heats = [heat for run in runs if (heat := queries.pairs(run)) is not None]
    return heat_maps(heats, x="trained version", y=_STALENESS, unit="trajectories", empty=missing(runs))


def _by_generator(run: RunData) -> list[Series]:
    return [
        Series(name=f"generate-{generator}", line=line, colour=colour_number(generator))
        for generator, line in queries.by_generator(run).items()
    ]


def _spans(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_per_run(runs, queries.mean_span)
        return line_chart(series, x=VERSIONS, y="versions per trajectory, mean", empty=missing(runs))
    series = [
        Series(name=_versions(number), line=line, colour=SEQUENCE[number - 1])
        for number, line in queries.spans(runs[0]).items()
        if line.y.any()
    ]
    return area_chart(series, x=VERSIONS, y="share of trajectories", empty=missing(runs), whole=1.0)


def _versions(number: int) -> str:
    if number == queries.MOST_SPANS:
        return f"{number} versions or more"
    return "1 version" if number == 1 else f"{number} versions"


def _outcomes(run: RunData) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    for source, part in {"": run, **{f"{name}: ": part for name, part in run.by_source.items()}}.items():
        amounts = queries.outcomes(part)
        trained_length = amounts[TRAINED][2]
        for name, (rollouts, tokens, length, reward) in amounts.items():
            figures = (number(length), number(length / trained_length if trained_length else np.nan), number(reward, 3))
            rows.append((f"{source}{name}", f"{rollouts:,}", f"{tokens:,}", *figures))
    return rows


def _decisions(run: RunData) -> list[tuple[str, ...]]:
    return [
        (
            f"{decision['policy_version']:,}",
            decision["change"],
            str(decision["max_staleness"]),
            decision["reason"],
        )
        for decision in reversed(run.latest("decisions"))
    ]


VIEW = View(
    name="staleness",
    title="Staleness",
    sentence="How many policy versions the trainer was ahead of the weights that sampled a trajectory.",
    blocks=(
        Chart(
            id="staleness-over-time",
            title="Staleness over time",
            sentence="Mean and maximum over the groups trained at each step, and the bound in force. For several "
            "runs: the mean.",
            build=lines(over_time, _mean, x=VERSIONS, y=_STALENESS),
        ),
        Table(
            id="staleness-decisions",
            title="Decisions",
            sentence="The trainer's decisions about the bound and rollbacks, with reasons; newest first. Decisions of "
            "rolled-back versions stay in the list.",
            build=lambda runs: rows_per_run(runs, _DECISIONS, _decisions),
            wide=True,
            requires=lambda run: bool(run.latest("decisions")),
        ),
        Chart(
            id="staleness-split",
            title="Sources of staleness",
            sentence="Mean staleness gained while trajectories were sampled, and while they waited in queues; the sum "
            "is the mean staleness. For several runs: the part from queues.",
            build=_split,
        ),
        Chart(
            id="staleness-distribution",
            title="Distribution now",
            sentence="Share of trajectories by staleness: the newest tenth of those trained, and the whole run. For "
            "several runs: the newest tenth.",
            build=_distribution(queries.distribution, "share of trajectories"),
        ),
        Chart(
            id="staleness-by-token",
            title="Distribution by token",
            sentence="Share of trained tokens by staleness, each by the version that sampled it: the newest tenth of "
            "the steps, and the whole run. A trajectory's staleness is that of its oldest token. For several runs: the "
            "newest tenth.",
            build=_distribution(queries.token_distribution, "share of tokens"),
            requires=lambda run: queries.token_distribution(run) is not None,
        ),
        Chart(
            id="staleness-pairs",
            title="Staleness by version",
            sentence="For the newest 120 versions: how many trajectories were trained at each version, by their "
            "staleness. The higher, the staler.",
            build=_pairs,
        ),
        Chart(
            id="staleness-by-generator",
            title="By generator",
            sentence="Mean staleness of each generator's trajectories: a generator that lags behind stands out. For "
            "several runs: the mean of all generators.",
            build=lines(_by_generator, _mean, x=VERSIONS, y="mean staleness, versions"),
        ),
        Chart(
            id="staleness-spans",
            title="Versions in one trajectory",
            sentence="Share of trajectories by how many policy versions sampled their tokens, because weights change "
            "during a response. For several runs: the mean number of versions.",
            build=_spans,
        ),
        Table(
            id="staleness-outcomes",
            title="Trained and dropped",
            sentence="The trajectories that the trainer took, by outcome. If a mean length differs from that of "
            "trained trajectories, dropping favours long or short responses.",
            build=lambda runs: rows_per_run(runs, _OUTCOMES, _outcomes),
        ),
        *stragglers.BLOCKS,
    ),
)
