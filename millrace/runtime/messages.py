"""Messages of a stage process to its supervisor: lines on its standard output. Its exit code: see `millrace.errors`.

milestone ─► the line as it is ───────────────────► Prefect's log, for people
error     ─► MARK {"error": {…}} ─────────────────► raised in the stage's task, if the exit code is the error's
event     ─► MARK {"event": …, "payload": {…}} ───► Prefect's event `millrace.<kind>`, for automations
heartbeat ─► MARK {"beat": …, "ready": …} ────────► the supervisor's hang detector
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from millrace.errors import from_json, to_json

EventKind = Literal[
    "version.published",
    "generator.lost",
    "generator.rejoined",
    "stage.restarted",
    "stage.hung",
    "stage.killed",
    "trainer.rolled-back",
    "trainer.uncompiled",
    "probe.alarm",
    "staleness.bound-hit",
    "staleness.length-bias",
    "staleness.control",
    "selection.starving",
    "reward.failed",
    "service.limit-reached",
    "training.collapsed",
    "pipeline.stalled",
    "placement.waiting",
    "checkpoint.saved",
    "checkpoint.promoted",
    "checkpoint.held-back",
]
"""Events of a run that an automation may act upon. Payloads: docs/operations.md."""

STARTING, LOADING = "starting", "loading the model"
"""Activities of a stage before it is ready."""
STOPPED = "stopped"
"""The activity of a stage that has ended."""

SHOW_STACKS = signal.SIGUSR1
"""Asks a stage that seems to hang to write its threads' stacks to its log. SIGTERM asks it to stop."""

_MARK = "\x1f"
"""Begins a line that is not for people: ASCII's unit separator, which `splitlines` keeps."""
_HEARTBEAT_SECONDS = 1.0

# Where lines go once `redirect_prints` has been called; None: standard output.
_pipe: TextIO | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: EventKind
    payload: Mapping[str, Any]
    """Plain JSON."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A sign that a stage's main thread makes progress."""

    doing: str
    ready: bool
    """Whether the stage does its actual work; before that it imports packages and loads its model."""


Message = Heartbeat | Event | Exception | str
"""A milestone is a plain string, an exception the error that the stage ends with."""


def encode_line(message: Message) -> str:
    """The line that `read_line` reads as this message.

    A milestone that quotes something, such as a model's text, can't become an event.
    """
    match message:
        case Exception():
            return _MARK + json.dumps({"error": to_json(message)})
        case Event():
            return _MARK + json.dumps({"event": message.kind, "payload": dict(message.payload)})
        case Heartbeat():
            return _MARK + json.dumps({"beat": message.doing, "ready": message.ready})
        case str():
            return message.replace(_MARK, "")


def read_line(line: str) -> Message:
    """Parses a line. Raises ValueError or KeyError for a malformed marked line."""
    if not line.startswith(_MARK):
        return line
    values = json.loads(line.removeprefix(_MARK))
    if "error" in values:
        return from_json(values["error"])
    if "beat" in values:
        return Heartbeat(doing=values["beat"], ready=values["ready"])
    return Event(kind=values["event"], payload=values["payload"])


def redirect_prints() -> None:
    """Sends everything that libraries and child processes print to the stage's log, not among its lines."""
    global _pipe
    _pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def watch_lifeline(on_end: Callable[[], None]) -> None:
    """Calls `on_end` in a thread when standard input ends, which the supervisor holds open."""

    def watch() -> None:
        # os.read, because a thread inside sys.stdin's buffer aborts the interpreter at exit.
        while os.read(0, 1024):
            pass
        on_end()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def send(message: Message) -> None:
    """Sends a message to the supervisor. Raises BrokenPipeError if it is gone."""
    print(encode_line(message), file=_pipe, flush=True)


class HeartbeatSender:
    """Sends a heartbeat at once when the activity changes, otherwise at most once per second.

    No thread sends heartbeats: if the main thread hangs, they must stop.
    """

    def __init__(self, send: Callable[[Heartbeat], None]) -> None:
        self._send = send
        self._last: Heartbeat | None = None
        self._sent = 0.0

    def offer(self, doing: str, *, ready: bool) -> None:
        """Sends a heartbeat if it is due."""
        heartbeat, now = Heartbeat(doing=doing, ready=ready), time.monotonic()
        if heartbeat != self._last or now - self._sent >= _HEARTBEAT_SECONDS:
            self._last, self._sent = heartbeat, now
            self._send(heartbeat)
