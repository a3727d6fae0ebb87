"""What a stage process tells its supervisor, one line at a time, on the pipe that was its standard output.

milestone ─► the line as it is ───────────────────► Prefect's log, for people
event     ─► MARK {"event": …, "payload": {…}} ───► Prefect's event `millrace.<kind>`, for automations
heartbeat ─► MARK {"beat": …, "ready": …} ────────► the supervisor's hang detector
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO

EventKind = Literal[
    "version.published",
    "generator.lost",
    "generator.rejoined",
    "stage.restarted",
    "stage.hung",
    "stage.killed",
    "trainer.rolled-back",
    "probe.alarm",
    "staleness.bound-hit",
    "staleness.length-bias",
    "staleness.control",
    "selection.starving",
    "reward.failed",
    "training.collapsed",
    "pipeline.stalled",
    "placement.waiting",
    "checkpoint.saved",
    "checkpoint.promoted",
    "checkpoint.held-back",
]
"""What can happen in a run that an automation may act upon. Payloads: docs/operations.md."""

STARTING, LOADING = "starting", "loading the model"
"""What a stage does before it can be ready."""
STOPPED = "stopped"
"""What a stage that has ended does."""

_MARK = "\x1f"
"""Begins a line that is not for people: ASCII's unit separator, which `splitlines` keeps."""
_HEARTBEAT_SECONDS = 1.0

# Where lines go once `redirect_prints` has been called; None: standard output.
_pipe: TextIO | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened."""

    kind: EventKind
    payload: Mapping[str, Any]
    """Plain JSON."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A stage's main thread is making progress."""

    doing: str
    """What the stage is doing."""
    ready: bool
    """Whether the stage does its actual work; before that it imports packages and loads its model."""


def milestone_line(text: str) -> str:
    """The line for a milestone. A milestone that quotes something, such as a model's text, can't become an event."""
    return text.replace(_MARK, "")


def event_line(event: Event) -> str:
    """The line that `read_line` reads as this event."""
    return _MARK + json.dumps({"event": event.kind, "payload": dict(event.payload)})


def heartbeat_line(heartbeat: Heartbeat) -> str:
    """The line that `read_line` reads as this heartbeat."""
    return _MARK + json.dumps({"beat": heartbeat.doing, "ready": heartbeat.ready})


def read_line(line: str) -> Heartbeat | Event | str:
    """Parses a line; a milestone is a plain string. Raises ValueError or KeyError for a malformed marked line."""
    if not line.startswith(_MARK):
        return line
    values = json.loads(line.removeprefix(_MARK))
    if "beat" in values:
        return Heartbeat(doing=values["beat"], ready=values["ready"])
    return Event(kind=values["event"], payload=values["payload"])


def redirect_prints() -> None:
    """From here on, what libraries and child processes print goes to the stage's log, not among its lines."""
    global _pipe
    _pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def send(line: str) -> None:
    """Sends one line. Raises BrokenPipeError if the supervisor is gone."""
    print(line, file=_pipe, flush=True)


class HeartbeatSender:
    """Sends a heartbeat at once when the stage does something new, otherwise at most once per second.

    No thread sends heartbeats: if the main thread hangs, they must stop.
    """

    def __init__(self) -> None:
        self._last: Heartbeat | None = None
        self._sent = 0.0

    def offer(self, heartbeat: Heartbeat) -> None:
        """Sends it if it is due. Raises BrokenPipeError if the supervisor is gone."""
        now = time.monotonic()
        if heartbeat == self._last and now - self._sent < _HEARTBEAT_SECONDS:
            return
        self._last, self._sent = heartbeat, now
        send(heartbeat_line(heartbeat))
