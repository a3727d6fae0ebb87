"""The charts of a comparison: a line for each run, smoothed, over policy versions or wall time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from dashboard.queries import learning, phases
from dashboard.queries.runs import comparison as queries
from dashboard.queries.series import ChartLine
from dashboard.read.model import RunData
from dashboard.views.blocks import Chart
from dashboard.views.colours import colour_number
from dashboard.views.figures import Series, line_chart
from dashboard.views.per_run import MINUTES, NO_STEP, VERSIONS

_BANDS_OPACITY = 0.4
"""Total opacity of all bands, so that lines stay visible."""
Move = Callable[[RunData, ChartLine], ChartLine]

_METRICS = (
    ("reward_mean", "Reward", "Mean reward of the groups trained at each step.", "mean reward"),
    ("staleness_mean", "Staleness", "Mean staleness of the trajectories trained at each step.", "policy versions"),
    (
        "effective_sample_size",
        "Effective sample size",
        "How many equally weighted tokens the clipped weights are worth, as a share of all: 1 is on-policy.",
        "share of tokens",
    ),
    ("entropy", "Entropy", "Entropy of the policy's next token.", "nats"),
    ("response_length_mean_tokens", "Response length", "Mean length of the responses of each step.", "tokens"),
)
"""Metric, title, sentence, unit."""


def _smoothed(metric: str, unit: str, x: str, move: Move) -> Callable[[Sequence[RunData]], go.Figure]:
    def build(runs: Sequence[RunData]) -> go.Figure:
        window = queries.window(runs)
        series = []
        for number, run in enumerate(runs):
            parts = queries.smoothed(run, metric, window)
            mean, low, high = (move(run, line) for line in parts)
            line_series = _series(run, number, mean)
            band: dict[str, Any] = (
                {"interval": (low, high), "interval_opacity": _BANDS_OPACITY / len(runs)} if window > 1 else {}
            )
            series.append(replace(line_series, **band))
        smoothing = f"; lines: mean of {window} versions, bands: the middle half of them" if window > 1 else ""
        return line_chart(series, x=x + smoothing, y=unit, empty=NO_STEP)

    return build


def _accuracy(x: str, move: Move) -> Callable[[Sequence[RunData]], go.Figure]:
    def build(runs: Sequence[RunData]) -> go.Figure:
        series = [_series(run, number, move(run, learning.accuracy(run))) for number, run in enumerate(runs)]
        return line_chart(series, x=x, y="accuracy", empty="No version has been evaluated yet.")

    return build


def progress(runs: Sequence[RunData]) -> go.Figure:
    """Draws the policy version of each run over wall time."""
    series = []
    for number, run in enumerate(runs):
        versions = phases.clock(run)
        series.append(_series(run, number, ChartLine(versions.y, versions.x)))
    return line_chart(series, x=MINUTES, y=VERSIONS, empty=NO_STEP, from_zero=True)


def _series(run: RunData, number: int, line: ChartLine) -> Series:
    return Series(name=run.info.run_id, line=line, colour=colour_number(number))


def charts(prefix: str, x: str, move: Move) -> list[Chart]:
    """Returns a chart per metric and one of the accuracy; ids start with `prefix`, `move` converts x values."""
    metric_charts = [
        Chart(
            id=f"{prefix}-{metric.replace('_', '-')}",
            title=title,
            sentence=sentence,
            build=_smoothed(metric, unit, x, move),
            wide=metric == "reward_mean",
        )
        for metric, title, sentence, unit in _METRICS
    ]
    accuracy = Chart(
        id=f"{prefix}-accuracy",
        title="Held-out accuracy",
        sentence="Mean reward of one greedy answer per held-out prompt, for each evaluated version.",
        build=_accuracy(x, move),
    )
    return [metric_charts[0], accuracy, *metric_charts[1:]]
