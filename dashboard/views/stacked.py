"""Charts stacked over a common x axis, with a common crosshair and zoom."""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboard.views.colours import GREY
from dashboard.views.figures import plain

_GAP = 0.05
"""Gap between two charts, as a share of the figure's height."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line across all charts."""

    x: float
    dash: str = "dot"
    label: str = ""
    """Label at the top, plain text."""
    details: str = ""
    """Tooltip of the label, plain text."""


def stacked(charts: Sequence[tuple[str, go.Figure]], *, x: str, height: int, marks: Sequence[Mark] = ()) -> go.Figure:
    """Stacks the charts with their titles from top to bottom; `height` is in pixels."""
    figure = go.Figure(layout=charts[0][1].layout)
    figure.update_layout(
        height=height,
        hovermode="x unified",
        hoversubplots="axis",
        # Opaque over the lines; the page's style gives it its colour.
        hoverlabel={"bgcolor": "#ffffff"},
        margin={"l": 56, "r": 8, "t": 22, "b": 36},
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
        figure.add_annotation(
            text=title, showarrow=False, xref="paper", yref="paper", x=0, y=top, xanchor="left", yanchor="bottom"
        )
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
