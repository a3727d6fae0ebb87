"""Times of the stages that run only occasionally: the bootstrap at the run's start, and evaluations.

They log no times. An evaluation's result contains its end and duration; the bootstrap's status record, the time of its
last update.
"""

import numpy as np

from dashboard.queries.series import Floats, Track, minutes
from dashboard.read.model import RunData

BOOTSTRAP, EVALUATE = "bootstrap", "evaluate"


def occasional_tracks(run: RunData) -> list[Track]:
    """Returns a track for each of the two stages that has run, over minutes since the run's first start."""
    named_spans = {BOOTSTRAP: _bootstrap(run), EVALUATE: _evaluations(run)}
    return [_track(run, name, spans) for name, spans in named_spans.items() if len(spans)]


def _bootstrap(run: RunData) -> Floats:
    """Span from the start of the attempt that ran it to its last status record, [1 or 0, 2] unix seconds."""
    record = run.stage_status.get(f"{BOOTSTRAP}-0", {})
    starts = [attempt.t_started for attempt in run.info.attempts if attempt.number == record.get("attempt", 0)]
    return np.array([(start, record["t"]) for start in starts if record.get("t", start) > start]).reshape(-1, 2)


def _evaluations(run: RunData) -> Floats:
    """Spans of evaluations with a known duration, merged if they overlap, [spans, 2] unix seconds."""
    t, seconds = run.evaluations["t"], run.evaluations["seconds"]
    has_duration = seconds > 0
    spans = np.stack([t - seconds, t], 1)[has_duration]
    spans = spans[np.argsort(spans[:, 0])]
    merged: list[list[float]] = []
    for begin, end in spans.tolist():
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([begin, end])
    return np.array(merged, np.float64).reshape(-1, 2)


def _track(run: RunData, name: str, spans: Floats) -> Track:
    """Makes a track that is busy within the spans and idle between them."""
    busy: Floats = np.tile([1.0, 0.0], len(spans))[:-1]
    return Track(name=name, edges=minutes(run, spans.ravel()), shares={name: busy})
