"""The timeline of a group: one bar per response, on a common axis of seconds."""

from dash import html
from dash.development.base_component import Component

from dashboard.queries.timeline import Segment, Timeline

MAX_ROWS = 64
_LEGEND = {
    "queued": "queued",
    "sampled": "sampled; a mark where a new version took over",
    "waited": "waited to be scored and trained",
    "trained": "trained",
}


def view(timeline: Timeline) -> Component:
    whole = timeline.seconds
    legend = [
        html.Span([html.Span(className=f"segment {kind}"), label], className="key") for kind, label in _LEGEND.items()
    ]
    rows = [_row(row_id, segments, whole) for row_id, segments in list(timeline.rows.items())[:MAX_ROWS]]
    sentence = f"Each response from its admission on, over {whole:.3g} s. {' '.join(timeline.notes)}"
    return html.Section(
        [html.H2("Timeline"), html.P(sentence, className="sentence"), html.Div(legend, className="row"), *rows],
        className="block wide",
        id="trajectories-timeline",
    )


def _row(row_id: int, segments: list[Segment], whole: float) -> Component:
    labels = [f"{segment.label}, {segment.end - segment.start:.3g} s" for segment in segments]
    bars = [
        html.Span(
            className=f"segment {segment.kind}",
            title=text,
            style={
                "left": f"{100 * segment.start / whole:.3f}%",
                "width": f"{100 * (segment.end - segment.start) / whole:.3f}%",
            },
        )
        for segment, text in zip(segments, labels, strict=True)
    ]
    track = html.Div(bars, className="track", role="img", **{"aria-label": "; ".join(labels)})
    return html.Div([html.Span(f"row {row_id:,}", className="name"), track], className="timeline")
