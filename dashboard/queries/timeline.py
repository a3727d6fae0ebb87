"""Times at which each response of a group was queued, sampled, waiting and trained, as far as recorded.

t_admitted ─ queued ─ t_started ─ sampled, by version ─ t_finished ─ waited ─ its step begins ─ trained ─ t of consumed

A version starts sampling when the generator's metrics record its load. The trainer's metrics contain the duration of a
step.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dashboard.queries.learning import TRAINER
from dashboard.queries.series import metric
from dashboard.read.groups import Group, Row, StoredResponse
from dashboard.read.model import RunData
from millrace.rollouts.consumed import TRAINED

Kind = Literal["queued", "sampled", "waited", "trained"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A period of a response, in seconds since the group was admitted."""

    kind: Kind
    label: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Segments of each readable response by row_id, and notes on missing records."""

    rows: dict[int, list[Segment]]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """End of the last segment."""
        return max((segments[-1].end for segments in self.rows.values() if segments), default=0.0)


def timeline(run: RunData, group: Group) -> Timeline:
    """Computes the timeline of the group's readable responses."""
    readable = [response for response in group.responses if response.trajectory is not None]
    if not readable:
        return Timeline(rows={}, notes=())
    begun = min(float(response.trajectory["t_admitted"]) for response in readable if response.trajectory is not None)
    notes = dict.fromkeys(["The time of scoring is not recorded, only its duration."])
    rows = {}
    for response in readable:
        assert response.trajectory is not None
        row = response.trajectory
        segments = [
            Segment(kind="queued", label="queued", start=row["t_admitted"], end=row["t_started"]),
            *_sampled(run, group.generator, row, notes),
            *_afterwards(run, response, row, notes),
        ]
        rows[response.row_id] = [
            Segment(kind=segment.kind, label=segment.label, start=segment.start - begun, end=segment.end - begun)
            for segment in segments
            if segment.end > segment.start
        ]
        if 0 in row["loss_mask"]:
            notes[
                "Time in tools and other turns of the environment is included in sampling, not recorded separately."
            ] = None
    return Timeline(rows=rows, notes=tuple(notes))


def _sampled(run: RunData, generator: int, row: Row, notes: dict[str, None]) -> list[Segment]:
    started, finished, versions = row["t_started"], row["t_finished"], row["span_versions"]
    loads = metric(run, f"generate-{generator}", "pause_seconds")
    within = (loads["incarnation"] == row["incarnation"]) & (loads["t"] > started) & (loads["t"] < finished)
    edges = [started]
    for version in versions[1:]:
        at = loads["t"][within & (loads["policy_version"] == version)]
        if len(at) == 0 or at[0] < edges[-1]:
            notes["The times at which some versions took over are not recorded in this run."] = None
            label = f"sampled by versions {versions[0]} to {versions[-1]}"
            return [Segment(kind="sampled", label=label, start=started, end=finished)]
        edges.append(float(at[0]))
    return [
        Segment(kind="sampled", label=f"sampled by version {version}", start=start, end=end)
        for version, start, end in zip(versions, edges, [*edges[1:], finished], strict=True)
    ]


def _afterwards(run: RunData, response: StoredResponse, row: Row, notes: dict[str, None]) -> list[Segment]:
    taken, finished = response.consumed, row["t_finished"]
    scored = f", scored for {response.score['seconds']:.3g} s of it" if response.score is not None else ""
    if taken is None:
        return []
    done = float(taken["t"])
    if taken["outcome"] != TRAINED:
        return [Segment(kind="waited", label=f"waited{scored}, then dropped", start=finished, end=done)]
    steps = metric(run, TRAINER, "train_seconds")
    seconds = steps["value"][steps["policy_version"] == taken["policy_version"]]
    if len(seconds) == 0:
        notes["The start of the step is not recorded in this run."] = None
        return [Segment(kind="waited", label=f"waited{scored}, and was trained", start=finished, end=done)]
    begun = max(finished, done - float(np.max(seconds)))
    return [
        Segment(kind="waited", label=f"waited{scored}", start=finished, end=begun),
        Segment(kind="trained", label=f"trained for version {taken['policy_version']}", start=begun, end=done),
    ]
