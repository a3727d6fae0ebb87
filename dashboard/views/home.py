"""A run's home page: reward, staleness, off-policy measures and the time of a step, over a common x axis."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from dashboard.queries import events, series
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
from dashboard.views.blocks import VERSIONS, Chart, View, line_per_source, missing
from dashboard.views.colours import GREEN, GREY, ORANGE, VIOLET, colour_of
from dashboard.views.figures import MOST_ROWS, Series, area_chart, line_chart, plain
from dashboard.views.staleness import over_time
from millrace.runtime.metrics import RECENT_STEPS, TIME

_MOST_BINS = 150
_SECONDS = "/seconds"
_GAP = 0.07
"""Gap between two charts, as a share of the figure's height."""
_STYLES = {"solid": "━━", "dash": "╍╍", "dot": "•••"}


def _home(runs: Sequence[RunData]) -> go.Figure:
    (run,) = runs
    if run.info.is_supervised:
        charts = [
            ("Loss", _lines(run, [Series(name="loss", line=_smoothed(run, "loss"), colour=ORANGE)])),
            ("Accuracy", _evaluated(run)),
        ]
    else:
        staleness = _lines(run, over_time(run)[:3], from_zero=True)
        charts = [("Reward", _reward(run)), ("Staleness", staleness), ("Off-policy", _off_policy(run))]
    charts.append(("Seconds per step", _phases(run)))
    marks: dict[int, Sequence[str]] = dict.fromkeys(restarts(run), ())
    return stacked(charts, x=VERSIONS, marks=marks | dict(events.config_changes(run)))


def _lines(run: RunData, lines: Sequence[Series], from_zero: bool = False) -> go.Figure:
    return line_chart(lines, x=VERSIONS, y="", empty=missing([run]), from_zero=from_zero)


def _reward(run: RunData) -> go.Figure:
    reward = Series(name="reward", line=_smoothed(run), colour=ORANGE)
    return _evaluated(run, reward, *line_per_source([run], _smoothed))


def _evaluated(run: RunData, *others: Series) -> go.Figure:
    """Draws the accuracy of each evaluated version, with the `others`."""
    accuracy, promoted, interval = series.accuracy(run), events.promotions(run), series.accuracy_interval(run)
    evaluated = Series(name="accuracy", line=accuracy, colour=GREY, dots_only=True, interval=interval)
    lines = [*others[:1], evaluated, *others[1:]]
    figure = _lines(run, lines)
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


def _off_policy(run: RunData) -> go.Figure:
    lines = [
        Series(name="π/μ, p95", line=series.measured(run, "importance_ratio_p95"), colour=GREEN, dash="dot"),
        Series(name="sample size", line=series.measured(run, "effective_sample_size"), colour=GREEN),
    ]
    return _lines(run, lines)


def _phases(run: RunData) -> go.Figure:
    seconds = step_phases(run).items()
    areas = [Series(name=kind, line=line, colour=colour_of(kind)) for kind, line in seconds]
    figure = area_chart(areas, x=VERSIONS, y="", empty=missing([run]))
    at = checkpoints(run)
    if areas and len(at):
        marker = {"symbol": "diamond", "color": GREEN}
        figure.add_scatter(x=at, y=0 * at, mode="markers", name="checkpoint", marker=marker, hoverinfo="skip")
    return figure


def _smoothed(run: RunData, name: str = "reward_mean") -> ChartLine:
    """Returns the mean of a metric over the ten steps up to each version, which the collapse rules also use."""
    return thin(mean_of_last(over_versions(run, TRAINER, name), RECENT_STEPS))


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
    # The step after the last version is still under way, or was never finished.
    edges = versions[:-1][:: -(-len(versions) // _MOST_BINS)]
    if len(edges) < 2:
        return {}
    by_kind = {}
    for kind, rows in named.items():
        line = series.ascending(rows["policy_version"], rows["value"])
        at = np.append(0.0, np.cumsum(line.y))[np.searchsorted(line.x, edges, side="right")]
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


def stacked(charts: Sequence[tuple[str, go.Figure]], *, x: str, marks: Mapping[int, Sequence[str]]) -> go.Figure:
    """Stacks the charts from top to bottom, each with its title, and the names and last values of its lines.

    `marks`: x of a vertical line → the changed settings that its label shows, if any.
    """
    figure = go.Figure(layout=charts[0][1].layout)
    figure.update_layout(
        # A box has the lines of one chart.
        hovermode="x unified",
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
        labelled = {id(trace): trace for trace in _labelled(chart)}
        for trace in chart.data:
            trace.update(xaxis="x", yaxis=f"y{suffix}")
            if trace.marker.symbol is None and id(trace) not in labelled:
                trace.hoverinfo = "skip"
            figure.add_trace(trace)
        if not chart.data and any(other.data for _, other in charts):
            # Plotly omits an axis without traces, which would move elements anchored to it.
            figure.add_scatter(x=[None], y=[None], yaxis=f"y{suffix}", hoverinfo="skip")
        paper = {"showarrow": False, "xref": "paper", "yref": "paper", "xanchor": "left", "align": "left"}
        labels = "&nbsp; ".join([f"<b>{title}</b>", *map(_label, labelled.values())])
        figure.add_annotation(text=labels, x=0, y=top, yanchor="bottom", **paper)
        for annotation in chart.layout.annotations:
            figure.add_annotation(annotation.to_plotly_json() | {"yref": "paper", "y": top - (share - _GAP) / 2})
    for at, changes in marks.items():
        line = {"color": GREY, "width": 1, "dash": "dash" if changes else "dot"}
        figure.add_shape(type="line", x0=at, x1=at, y0=0, y1=1, yref="paper", line=line)
        if changes:
            figure.add_annotation(
                text="config", hovertext=plain("; ".join(changes)), showarrow=False, x=at, xanchor="left",
                yref="paper", y=1, yanchor="top",
            )  # fmt: skip
    figure.update_xaxes(
        title={"text": x}, visible=len(figure.data) > 0, anchor=f"y{len(charts)}", showspikes=True, spikemode="across",
        spikesnap="cursor", spikethickness=1, spikedash="solid",
    )  # fmt: skip
    return figure


def _labelled(chart: go.Figure) -> list[go.Scatter]:
    """Returns the lines that have a label and a row in the hover box: at most four, the largest."""
    traces = [trace for trace in chart.data if trace.name and len(_finite(trace.y))]
    most = MOST_ROWS - sum(trace.hovertemplate is not None for trace in traces)
    traces = [trace for trace in traces if trace.marker.symbol is None]
    is_area = any(trace.fillcolor for trace in traces)
    if is_area or len(traces) > most:
        traces.sort(key=lambda trace: -_finite(trace.y).mean())
    return traces[:most]


def _label(trace: go.Scatter) -> str:
    """Returns colour and style, name and last value of a line."""
    style = "■" if trace.fillcolor else "●" if trace.mode == "markers" else _STYLES[trace.line.dash or "solid"]
    key = f'<span style="color:{trace.fillcolor or trace.marker.color}">{style}</span>'
    name = "waiting" if trace.name.startswith("waiting") else trace.name
    return f"{key} {name} {_finite(trace.y)[-1]:.3g}"


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
            sentence=f"Reward, loss and the figures above are means of {RECENT_STEPS} steps, other lines are of single "
            "steps; numbers are the last values. ★ promoted, ◆ checkpoint; vertical: restarts (dotted), resumes with "
            "changes (dashed).",
            build=_home,
            wide=True,
        ),
    ),
)
