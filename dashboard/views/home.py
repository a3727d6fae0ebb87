"""A run's home page: reward, staleness, off-policy measures and the time of a step, over a common x axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from dashboard.queries import events, series, staleness
from dashboard.queries.series import (
    TRAINER,
    ChartLine,
    Floats,
    mean_of_last,
    metric,
    over_versions,
    thin,
)
from dashboard.read.model import RunData
from dashboard.views.blocks import Chart, View
from dashboard.views.colours import BLUE, GREEN, GREY, ORANGE, SKY, VIOLET, colour_of
from dashboard.views.figures import Series, area_chart, line_chart, plain
from dashboard.views.per_run import VERSIONS, line_per_source, missing
from millrace.control.collapse import STEPS
from millrace.runtime.metrics import TIME

_MOST_BINS = 150
_SECONDS = "/seconds"
_GAP = 0.07
"""Gap between two charts, as a share of the figure's height."""
_MOST_LABELS = 4


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line across all charts."""

    x: float
    dash: str = "dot"
    label: str = ""
    """Label at the top, plain text."""
    details: str = ""
    """Tooltip of the label, plain text."""


def _home(runs: Sequence[RunData]) -> go.Figure:
    (run,) = runs
    charts = [
        ("Reward", _reward(run)),
        ("Staleness", _staleness(run)),
        ("Off-policy", _off_policy(run)),
        ("Seconds per step", _phases(run)),
    ]
    marks = [Mark(x=version) for version in restarts(run)]
    for version, sentences in events.config_changes(run).items():
        marks.append(Mark(x=version, dash="dash", label="config", details="; ".join(sentences)))
    return stacked(charts, x=VERSIONS, marks=marks)


def _reward(run: RunData) -> go.Figure:
    accuracy, promoted = series.accuracy(run), events.promotions(run)
    lines = [
        Series(name="reward", line=smoothed_reward(run), colour=ORANGE),
        Series(name="accuracy", line=accuracy, colour=GREY, dots_only=True, interval=series.accuracy_interval(run)),
        *line_per_source([run], smoothed_reward),
    ]
    figure = line_chart(lines, x=VERSIONS, y="", empty=missing([run]))
    # A star at the accuracy of each promoted version.
    chosen = np.isin(accuracy.x, [*promoted])
    if chosen.any():
        figure.add_scatter(
            x=accuracy.x[chosen], y=accuracy.y[chosen], mode="markers", name="promoted",
            marker={"symbol": "star", "size": 13, "color": VIOLET},
            text=[plain(promoted[int(version)]) for version in accuracy.x[chosen]],
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    return figure


def _staleness(run: RunData) -> go.Figure:
    mean, largest = staleness.over_time(run)
    lines = [
        Series(name="mean", line=mean, colour=BLUE),
        Series(name="largest", line=largest, colour=SKY, dash="dot"),
        Series(name=staleness.bound_name(run), line=staleness.bound(run), colour=GREY, dash="dash", stepped=True),
    ]
    return line_chart(lines, x=VERSIONS, y="", empty=missing([run]), from_zero=True)


def _off_policy(run: RunData) -> go.Figure:
    lines = [
        Series(name="π/μ, p95", line=series.measured(run, "importance_ratio_p95"), colour=GREEN, dash="dot"),
        Series(name="sample size", line=series.measured(run, "effective_sample_size"), colour=GREEN),
    ]
    return line_chart(lines, x=VERSIONS, y="", empty=missing([run]))


def _phases(run: RunData) -> go.Figure:
    seconds = step_phases(run).items()
    areas = [Series(name=kind, line=line, colour=colour_of(kind)) for kind, line in seconds]
    figure = area_chart(areas, x=VERSIONS, y="", empty=missing([run]))
    at = checkpoints(run)
    if areas and len(at):
        marker = {"symbol": "diamond", "color": GREEN}
        figure.add_scatter(x=at, y=0 * at, mode="markers", name="checkpoint", marker=marker, hoverinfo="skip")
    return figure


def smoothed_reward(run: RunData) -> ChartLine:
    """Mean reward of the ten steps up to each version, which the collapse rules also use."""
    return thin(mean_of_last(over_versions(run, TRAINER, "reward_mean"), STEPS))


def step_phases(run: RunData) -> Mapping[str, ChartLine]:
    """The trainer's seconds per step by kind of work and waiting, over policy versions.

    Times are recorded about every two seconds, so a point is the mean over the steps between two records.
    """
    named = {
        name.removeprefix(TIME).removesuffix(_SECONDS): rows
        for name, rows in run.metrics.get(TRAINER, {}).items()
        if name.startswith(TIME) and len(rows["t"])
    }
    if not named:
        return {}
    versions = np.unique(np.concatenate([rows["policy_version"] for rows in named.values()])).astype(np.float64)
    edges = versions[:: -(-len(versions) // _MOST_BINS)]
    if len(edges) < 2:
        return {}
    by_kind = {}
    for kind, rows in named.items():
        cumulative = np.append(0.0, np.cumsum(rows["value"]))
        at = cumulative[np.searchsorted(rows["policy_version"], edges, side="right")]
        by_kind[kind] = ChartLine(edges[1:], np.diff(at) / np.diff(edges))
    return by_kind


def restarts(run: RunData) -> list[int]:
    """Policy versions at which a stage was restarted, or the run was resumed with the same config."""
    restarted = {event.policy_version for event in events.incidents(run) if event.kind == events.RESTART}
    resumed = {attempt.first_step for attempt in run.info.attempts[1:] if not attempt.changes}
    return sorted(restarted | resumed)


def checkpoints(run: RunData) -> Floats:
    """Policy versions at which the trainer spent time on a checkpoint."""
    rows = metric(run, TRAINER, f"{TIME}checkpoint{_SECONDS}")
    versions: Floats = np.unique(rows["policy_version"][rows["value"] > 0]).astype(np.float64)
    return versions


def stacked(charts: Sequence[tuple[str, go.Figure]], *, x: str, marks: Sequence[Mark] = ()) -> go.Figure:
    """Stacks the charts from top to bottom, each with its title, and the names and last values of its lines."""
    figure = go.Figure(layout=charts[0][1].layout)
    figure.update_layout(
        hovermode="x unified",
        hoversubplots="axis",
        # Opaque over the lines; the page's style gives it its colour.
        hoverlabel={"bgcolor": "#ffffff"},
        margin={"l": 48, "r": 8, "t": 22, "b": 36},
        showlegend=False,
    )
    figure.layout.annotations = ()
    share = (1 + _GAP) / len(charts)
    for number, (title, chart) in enumerate(charts):
        suffix = "" if number == 0 else str(number + 1)
        top = 1 - number * share
        axis = chart.layout.yaxis.to_plotly_json() | {"domain": [max(0.0, top - share + _GAP), top]}
        figure.update_layout({f"yaxis{suffix}": {**axis, "title": {"text": ""}, "nticks": 4, "anchor": "x"}})
        for trace in chart.data:
            trace.update(xaxis="x", yaxis=f"y{suffix}")
            figure.add_trace(trace)
        if not chart.data and any(other.data for _, other in charts):
            # Plotly omits an axis without traces, which would move elements anchored to it.
            figure.add_scatter(x=[None], y=[None], yaxis=f"y{suffix}", hoverinfo="skip")
        paper = {"showarrow": False, "xref": "paper", "yref": "paper", "xanchor": "left", "align": "left"}
        labels = "&nbsp; ".join([f"<b>{title}</b>", *_labels(chart)])
        figure.add_annotation(text=labels, x=0, y=top, yanchor="bottom", **paper)
        for annotation in chart.layout.annotations:
            figure.add_annotation(annotation.to_plotly_json() | {"yref": "paper", "y": top - (share - _GAP) / 2})
    for mark in marks:
        line = {"color": GREY, "width": 1, "dash": mark.dash}
        figure.add_shape(type="line", x0=mark.x, x1=mark.x, y0=0, y1=1, yref="paper", line=line)
        if mark.label:
            figure.add_annotation(
                text=plain(mark.label), hovertext=plain(mark.details), showarrow=False, x=mark.x, xanchor="left",
                yref="paper", y=1, yanchor="top",
            )  # fmt: skip
    figure.update_xaxes(
        title={"text": x}, visible=len(figure.data) > 0, anchor=f"y{len(charts)}", showspikes=True, spikemode="across",
        spikesnap="cursor", spikethickness=1, spikedash="solid",
    )  # fmt: skip
    return figure


def _labels(chart: go.Figure) -> list[str]:
    """Returns colour, name and last value of each line; of many areas the largest."""
    lines = [(_finite(trace.y), trace) for trace in chart.data if trace.name and trace.marker.symbol is None]
    lines = [(values, trace) for values, trace in lines if len(values)]
    if len(lines) > _MOST_LABELS:
        lines = sorted(lines, key=lambda line: -line[0].mean())[:_MOST_LABELS]
    return [
        f'<span style="color:{trace.fillcolor or trace.marker.color}">●</span> {_short(trace.name)} {values[-1]:.3g}'
        for values, trace in lines
    ]


def _short(name: str) -> str:
    return "waiting" if name.startswith("waiting") else name


def _finite(y: object) -> Floats:
    values = np.asarray(y, np.float64)
    finite: Floats = values[np.isfinite(values)]
    return finite


HOME = View(
    name="home",
    title="Home",
    sentence="",
    is_smooth=True,
    blocks=(
        Chart(
            id="home-charts",
            title="Overview",
            sentence="Reward is a mean of 10 steps; numbers are the last values. ★ promoted, ◆ checkpoint; vertical "
            "lines: a restart (dotted), a resume with changes (dashed).",
            build=_home,
            wide=True,
        ),
    ),
)
