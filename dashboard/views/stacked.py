"""Charts stacked over a common x axis, with a common crosshair and zoom."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from dashboard.queries.series import Floats
from dashboard.views.colours import GREY
from dashboard.views.figures import plain

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
