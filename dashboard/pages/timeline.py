"""The timeline of a group: when each response was queued, sampled, waiting and trained, as far as recorded.

t_admitted ─ queued ─ t_started ─ sampled, by version ─ t_finished ─ waited ─ its step begins ─ trained ─ t of consumed

A version starts sampling when the generator's metrics record its load. The trainer's metrics contain the duration of a
step.
"""

from typing import NamedTuple

import numpy as np
from dash import html
from dash.development.base_component import Component

from dashboard.queries.series import TRAINER, metric
from dashboard.read.groups import Group, Row, StoredResponse
from dashboard.read.model import RunData
from millrace.rollouts.consumed import TRAINED

MAX_ROWS = 64
_LEGEND = {
    "queued": "queued",
    "sampled": "sampled; a mark where a new version took over",
    "waited": "waited to be scored and trained",
    "trained": "trained",
}


class Segment(NamedTuple):
    """A period of a response, from `start` to `end`, unix seconds."""

    kind: str
    """A key of the legend."""
    label: str
    start: float
    end: float


def view(run: RunData, group: Group) -> list[Component]:
    """Draws one bar per readable response on a common axis of seconds; nothing if none can be read."""
    notes = dict.fromkeys(["The time of scoring is not recorded, only its duration."])
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


def segments(run: RunData, group: Group, notes: dict[str, None]) -> dict[int, list[Segment]]:
    """Returns row_id → segments of each readable response; adds a sentence to `notes` for each missing record."""
    rows = {}
    for response in group.responses:
        if (row := response.trajectory) is None:
            continue
        if 0 in row["loss_mask"]:
            notes["Time in tools and other turns of the environment is included in sampling."] = None
        parts = [
            Segment("queued", "queued", row["t_admitted"], row["t_started"]),
            *_sampled(run, group.generator, row, notes),
            *_afterwards(run, response, row, notes),
        ]
        rows[response.row_id] = [part for part in parts if part.end > part.start]
    return rows


def _sampled(run: RunData, generator: int, row: Row, notes: dict[str, None]) -> list[Segment]:
    started, finished, versions = row["t_started"], row["t_finished"], row["span_versions"]
    loads = metric(run, f"generate-{generator}", "pause_seconds")
    within = (loads["incarnation"] == row["incarnation"]) & (loads["t"] > started) & (loads["t"] < finished)
    edges = [started]
    for version in versions[1:]:
        at = loads["t"][within & (loads["policy_version"] == version)]
        if len(at) == 0 or at[0] < edges[-1]:
            notes["The times at which some versions took over are not recorded in this run."] = None
            return [Segment("sampled", f"sampled by versions {versions[0]} to {versions[-1]}", started, finished)]
        edges.append(float(at[0]))
    return [
        Segment("sampled", f"sampled by version {version}", start, end)
        for version, start, end in zip(versions, edges, [*edges[1:], finished], strict=True)
    ]


def _afterwards(run: RunData, response: StoredResponse, row: Row, notes: dict[str, None]) -> list[Segment]:
    taken, finished = response.consumed, row["t_finished"]
    scored = f", scored for {response.score['seconds']:.3g} s of it" if response.score is not None else ""
    if taken is None:
        return []
    done = float(taken["t"])
    if taken["outcome"] != TRAINED:
        return [Segment("waited", f"waited{scored}, then dropped", finished, done)]
    steps = metric(run, TRAINER, "train_seconds")
    seconds = steps["value"][steps["policy_version"] == taken["policy_version"]]
    if len(seconds) == 0:
        notes["The start of the step is not recorded in this run."] = None
        return [Segment("waited", f"waited{scored}, and was trained", finished, done)]
    begun = max(finished, done - float(np.max(seconds)))
    return [
        Segment("waited", f"waited{scored}", finished, begun),
        Segment("trained", f"trained for version {taken['policy_version']}", begun, done),
    ]
