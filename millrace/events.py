"""What a stage tells its supervisor, a line each, and which events there are.

milestone ─► the line as it is ───────────────────► Prefect's log, for people
event     ─► MARK {"event": …, "payload": {…}} ───► Prefect's event `millrace.<kind>`, for automations
beat      ─► MARK {"beat": …, "ready": …} ────────► the supervisor's watch: the main thread gets on, and at what it is
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

EventKind = Literal[
    "version.published",
    "generator.lost",
    "generator.rejoined",
    "stage.restarted",
    "stage.hung",
    "staleness.bound-hit",
    "reward.collapsed",
    "pipeline.stalled",
    "placement.waiting",
    "checkpoint.promoted",
    "checkpoint.held-back",
]
"""What happens in a run that an automation may act upon. Payloads: docs/decisions/0021."""

STARTING, LOADING = "starting", "loading the model"
"""What a stage is at before it can be ready."""
STOPPED = "stopped"
"""What it is at once it has ended."""

_MARK = "\x1f"
"""Begins a line that is not for people: ASCII's unit separator, which nobody writes, and `splitlines` leaves alone."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened."""

    kind: EventKind
    payload: Mapping[str, Any]
    """Plain JSON."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A sign that a stage's main thread gets on."""

    doing: str
    """What it is at."""
    ready: bool
    """Whether the stage does what it is there for; before, it imports, and loads its model."""


def milestone_line(text: str) -> str:
    """The line that people are to read. What a milestone quotes, such as a model's words, can't become an event."""
    return text.replace(_MARK, "")


def event_line(event: Event) -> str:
    """The line that `read_line` reads as this event."""
    return _MARK + json.dumps({"event": event.kind, "payload": dict(event.payload)})


def beat_line(beat: Beat) -> str:
    """The line that `read_line` reads as this beat."""
    return _MARK + json.dumps({"beat": beat.doing, "ready": beat.ready})


def read_line(line: str) -> Beat | Event | str:
    """What a line says; a milestone is itself. Raises ValueError or KeyError where a marked line is neither."""
    if not line.startswith(_MARK):
        return line
    values = json.loads(line.removeprefix(_MARK))
    if "beat" in values:
        return Beat(doing=values["beat"], ready=values["ready"])
    return Event(kind=values["event"], payload=values["payload"])
