"""The timeline of a group: one bar per response, on a common axis of seconds."""

from dash import html
from dash.development.base_component import Component

from dashboard.queries.timeline import Segment, segments
from dashboard.read.groups import Group
from dashboard.read.model import RunData

MAX_ROWS = 64
_LEGEND = {
    "queued": "queued",
    "sampled": "sampled; a mark where a new version took over",
    "environment": "answered by its environment",
    "waited": "waited",
    "scored": "scored",
    "trained": "trained",
}


def view(run: RunData, group: Group) -> list[Component]:
    """Draws one bar per readable response on a common axis of seconds; nothing if none can be read."""
    notes: dict[str, None] = {}
    rows = segments(run, group, notes)
    if not any(rows.values()):
        return []
    begun = min(of_row[0].start for of_row in rows.values() if of_row)
    whole = max(of_row[-1].end for of_row in rows.values() if of_row) - begun
    legend = [
        html.Span([html.Span(className=f"segment {kind}"), label], className="key") for kind, label in _LEGEND.items()
    ]
    bars = [_bar(row_id, of_row, begun, whole) for row_id, of_row in list(rows.items())[:MAX_ROWS]]
    sentence = f"Each response from its admission on, over {whole:.3g} s. {' '.join(notes)}"
    return [
        html.Section(
            [html.H2("Timeline"), html.P(sentence, className="sentence"), html.Div(legend, className="row"), *bars],
            className="block wide",
            id="trajectories-timeline",
        )
    ]


def _bar(row_id: int, of_row: list[Segment], begun: float, whole: float) -> Component:
    labels = [f"{segment.label}, {segment.end - segment.start:.3g} s" for segment in of_row]
    bars = [
        html.Span(
            className=f"segment {segment.kind}",
            title=text,
            style={
                "left": f"{100 * (segment.start - begun) / whole:.3f}%",
                "width": f"{100 * (segment.end - segment.start) / whole:.3f}%",
            },
        )
        for segment, text in zip(of_row, labels, strict=True)
    ]
    track = html.Div(bars, className="track", role="img", **{"aria-label": "; ".join(labels)})
    return html.Div([html.Span(f"row {row_id:,}", className="name"), track], className="timeline")
