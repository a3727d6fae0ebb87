"""A run's home page: reward, staleness, off-policy measures and the time of a step."""

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go

from dashboard.queries import events, learning, phases, staleness
from dashboard.queries.series import ChartLine
from dashboard.read.model import RunData
from dashboard.views.blocks import Chart, View
from dashboard.views.colours import BLUE, GREEN, GREY, ORANGE, SKY, VIOLET, colour_of
from dashboard.views.figures import Series, area_chart, line_chart, plain
from dashboard.views.per_run import MINUTES, VERSIONS, line_per_source, missing
from dashboard.views.stacked import Mark, stacked

Move = Callable[[ChartLine], ChartLine]


def _home(run: RunData, x: str, move: Move) -> go.Figure:
    charts = [
        ("Reward", _reward(run, x, move)),
        ("Staleness", _staleness(run, x, move)),
        ("Off-policy", _off_policy(run, x, move)),
        ("Seconds per step", _phases(run, x, move)),
    ]
    return stacked(charts, x=x, marks=_marks(run, move))


def _marks(run: RunData, move: Move) -> list[Mark]:
    changed = events.config_changes(run)
    marks = [Mark(x=at) for at in _at(phases.restarts(run).tolist(), move)]
    for at, sentences in zip(_at([*changed], move), changed.values(), strict=True):
        marks.append(Mark(x=at, dash="dash", label="config", details="; ".join(sentences)))
    return marks


def _at(versions: Sequence[float], move: Move) -> list[float]:
    """Converts policy versions to positions on the x axis."""
    at = np.array(versions, np.float64)
    return [float(x) for x in move(ChartLine(at, at)).x]


def _reward(run: RunData, x: str, move: Move) -> go.Figure:
    low, high = learning.accuracy_interval(run)
    series = [
        Series(name="reward", line=move(phases.smoothed_reward(run)), colour=ORANGE),
        Series(
            name="accuracy",
            line=move(learning.accuracy(run)),
            colour=GREY,
            dots_only=True,
            interval=(move(low), move(high)),
        ),
        *line_per_source([run], lambda of_source: move(phases.smoothed_reward(of_source))),
    ]
    figure = line_chart(series, x=x, y="", empty=missing([run]))
    _add_promotions(figure, run, move)
    return figure


def _add_promotions(figure: go.Figure, run: RunData, move: Move) -> None:
    """Adds a star at the accuracy of each promoted version."""
    accuracy, promoted = learning.accuracy(run), events.promotions(run)
    is_promoted = np.isin(accuracy.x, [*promoted])
    if not is_promoted.any():
        return
    at = move(ChartLine(accuracy.x[is_promoted], accuracy.y[is_promoted]))
    texts = [plain(promoted[int(version)]) for version in accuracy.x[is_promoted]]
    figure.add_scatter(
        x=at.x, y=at.y, mode="markers", name="promoted", marker={"symbol": "star", "size": 13, "color": VIOLET},
        text=texts, hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip


def _staleness(run: RunData, x: str, move: Move) -> go.Figure:
    mean, largest = staleness.over_time(run)
    series = [
        Series(name="mean", line=move(mean), colour=BLUE),
        Series(name="largest", line=move(largest), colour=SKY, dash="dot"),
    ]
    if len(mean.x):
        name, line = staleness.bound_name(run), move(staleness.bound(run))
        series.append(Series(name=name, line=line, colour=GREY, dash="dash", stepped=True))
    return line_chart(series, x=x, y="", empty=missing([run]), from_zero=True)


def _off_policy(run: RunData, x: str, move: Move) -> go.Figure:
    series = [
        Series(name="π/μ, p95", line=move(learning.measured(run, "importance_ratio_p95")), colour=GREEN, dash="dot"),
        Series(name="sample size", line=move(learning.measured(run, "effective_sample_size")), colour=GREEN),
    ]
    return line_chart(series, x=x, y="", empty=missing([run]))


def _phases(run: RunData, x: str, move: Move) -> go.Figure:
    seconds = phases.step_phases(run)
    series = [Series(name=kind, line=move(line), colour=colour_of(kind)) for kind, line in seconds.items()]
    figure = area_chart(series, x=x, y="", empty=missing([run]))
    at = phases.checkpoints(run)
    if series and len(at):
        moved = move(ChartLine(at, 0 * at))
        figure.add_scatter(
            x=moved.x, y=moved.y, mode="markers", name="checkpoint", marker={"symbol": "diamond", "color": GREEN},
            hoverinfo="skip",
        )  # fmt: skip
    return figure


_SENTENCE = (
    "Reward is a mean of 10 steps; numbers are the last values. ★ promoted, ◆ checkpoint; vertical lines: a restart "
    "(dotted), a resume with changes (dashed)."
)

_BY_VERSION = Chart(
    id="home-charts",
    title="By version",
    sentence=_SENTENCE,
    build=lambda runs: _home(runs[0], VERSIONS, lambda line: line),
    wide=True,
)
_BY_TIME = Chart(
    id="home-time-charts",
    title="By wall time",
    sentence=_SENTENCE,
    build=lambda runs: _home(runs[0], MINUTES, lambda line: phases.by_clock(runs[0], line)),
    wide=True,
)

HOME = View(name="home", title="Home", sentence="", blocks=(_BY_VERSION,))
HOME_BY_TIME = View(name="home-time", title="By time", sentence="", blocks=(_BY_TIME,))
