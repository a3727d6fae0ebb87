"""Times at which each response of a group was queued, sampled, scored, waiting and trained, as far as recorded.

t_admitted ─ queued ─ t_started ─ sampled ─ t_finished ─ waited ─ scored ─ t_scored ─ waited ─ trained ─ t of consumed
                                   └ environment, for each of its answers

A version starts sampling when the generator's metrics record its load. The trainer's metrics contain the duration of a
step.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dashboard.queries.series import TRAINER, metric
from dashboard.read.groups import Group, Row
from dashboard.read.model import RunData
from millrace.rollouts.consumed import TRAINED

Kind = Literal["queued", "sampled", "environment", "waited", "scored", "trained"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A period of a response, from `start` to `end`, unix seconds."""

    kind: Kind
    label: str
    start: float
    end: float
    policy_version: int | None = None
    """The version that sampled, or that the step made; None if unknown, or for another kind."""


def segments(run: RunData, group: Group, notes: dict[str, None]) -> dict[int, list[Segment]]:
    """Returns row_id → segments of each readable response; adds a sentence to `notes` for each missing record."""
    return {
        response.row_id: segments_of(
            run, group.generator, response.trajectory, response.score, response.consumed, notes
        )
        for response in group.responses
        if response.trajectory is not None
    }


def segments_of(
    run: RunData, generator: int, trajectory: Row, score: Row | None, consumed: Row | None, notes: dict[str, None]
) -> list[Segment]:
    """Computes the segments of a response of `generator`, in unix seconds. Adds missing records to `notes`."""
    answers = trajectory["t_environment"]
    segments = [
        Segment(kind="queued", label="queued", start=trajectory["t_admitted"], end=trajectory["t_started"]),
        *_sampled(run, generator, trajectory, notes),
        *(
            Segment(kind="environment", label="its environment answered", start=start, end=end)
            for start, end in zip(answers[::2], answers[1::2], strict=True)
        ),
        *_afterwards(run, trajectory["t_finished"], score, consumed, notes),
    ]
    return [segment for segment in segments if segment.end > segment.start]


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
        Segment(kind="sampled", label=f"sampled by version {version}", start=start, end=end, policy_version=version)
        for version, start, end in zip(versions, edges, [*edges[1:], finished], strict=True)
    ]


def _afterwards(
    run: RunData, finished: float, score: Row | None, taken: Row | None, notes: dict[str, None]
) -> list[Segment]:
    segments: list[Segment] = []
    if score is not None and score["t_scored"] > finished:
        begun = max(finished, score["t_scored"] - score["seconds"])
        segments += [
            Segment(kind="waited", label="waited to be scored", start=finished, end=begun),
            Segment(kind="scored", label="scored", start=begun, end=score["t_scored"]),
        ]
        finished = score["t_scored"]
    if taken is None:
        return segments
    done, version = float(taken["t"]), taken["policy_version"]
    if taken["outcome"] != TRAINED:
        return [*segments, Segment(kind="waited", label="waited, then dropped", start=finished, end=done)]
    steps = metric(run, TRAINER, "train_seconds")
    seconds = steps["value"][(steps["policy_version"] == version) & (steps["incarnation"] == taken["incarnation"])]
    if len(seconds) == 0:
        notes["The start of the step is not recorded in this run."] = None
        return [*segments, Segment(kind="waited", label="waited, and was trained", start=finished, end=done)]
    begun = max(finished, done - float(np.max(seconds)))
    label = f"trained for version {version}"
    return [
        *segments,
        Segment(kind="waited", label="waited for its step", start=finished, end=begun),
        Segment(kind="trained", label=label, start=begun, end=done, policy_version=version),
    ]
