"""The common part of every stage process: how it reports, waits, and drains.

    supervisor ──stdin (lifeline)──► stage        end of file: the controller is gone   ┬─► `draining` is set
               ──SIGTERM──────────►               asked to stop                         ┘
               ──SIGUSR1──────────►               seems to hang: writes its threads' stacks to its log
               ◄──stdout───────────               milestones, events, heartbeats, an error (`runtime.messages`)
               ◄──exit code────────               see `millrace.errors` and `millrace.runtime.entry`

A stage's loop checks `draining` between two units of work, finishes the current one, commits, and returns. Its main
thread sends a heartbeat whenever it begins something, has finished something, or polls while it waits. Within a
long unit of work, such as an optimizer step, it calls `advance`.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from configs.schema import RunConfig
from millrace.runtime.arguments import StageArguments
from millrace.runtime.messages import (
    LOADING,
    STARTING,
    STOPPED,
    Event,
    EventKind,
    HeartbeatSender,
    Message,
    send,
)
from millrace.runtime.metrics import TIME, MetricsWriter, RewardCurve
from millrace.runtime.usage import CPU_CORES, MEMORY_BYTES, Gpus, ProcessTree
from storage import layout
from storage.errors import StoreRefused
from storage.progress import read_status, write_progress
from storage.stores.base import Store

_PROGRESS_SECONDS = 0.25
_TIMES_SECONDS = 2.0
_ADVANCED_SECONDS = 2.0
"""How often a stage reports within a unit of work."""
_LATENESS = 0.02
"""After a long wait, its end may be noticed late by this share of it: polling takes CPU time from other stages."""
_MAX_POLL_GAP = 10
"""Longest time between two polls, in the store's `poll_seconds`."""
_LONG_RUNNING = frozenset({"generate", "score", "teach", "train", "sync_weights"})
"""Stages that run as long as the campaign: only their times are logged as metrics."""


@dataclass(kw_only=True)
class Stage:
    """A running stage process: its run, its config, whether to stop, and its status record."""

    name: str
    arguments: StageArguments
    config: RunConfig
    store: Store
    draining: bool = False
    """Asked to stop. A plain flag: a signal handler that sets an Event hangs if it interrupts that Event's own wait."""
    awaits_engine: bool = False
    """While set, no heartbeat is sent: only results of its engine are progress."""

    on_version: Callable[[int], None] = lambda version: None
    """Called with each policy version that a trainer has made or a generator got."""
    on_activity: Callable[[str, float, bool], None] = lambda what, seconds, waited: None
    """Called after the stage has done, or waited for, something for this many seconds."""

    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Distinguishes this process from its predecessors, whose status record it continues."""

    def __post_init__(self) -> None:
        # Seconds and counts continue where the predecessor's last status record left them.
        self._values: dict[str, Any] = read_status(self.store, self.name, self.replica)
        self._seconds: dict[str, float] = dict(self._values.get("seconds", {}))
        self._doing = STARTING
        self._ready = False
        self._busy = 0.0
        self._times: dict[str, float] = {}
        self._times_logged = time.monotonic()
        self._written = self._advanced = 0.0
        self._heartbeats = HeartbeatSender(self._send)
        self._metrics: MetricsWriter | None = None
        self._processes = ProcessTree()
        self._gpus = Gpus(self.arguments.devices, self.log)
        self._run_inode = self._find_run_inode()

    @property
    def replica(self) -> int:
        return self.arguments.replica

    @property
    def metrics(self) -> MetricsWriter:
        """This process's metrics stream, opened at first use."""
        if self._metrics is None:
            self._metrics = MetricsWriter(self.store, self.name, self.replica)
        return self._metrics

    def drain(self) -> None:
        """Asks the stage to stop."""
        self.draining = True

    def log(self, line: str) -> None:
        """Reports something worth a line in the Prefect UI."""
        self._send(line)

    def emit_event(self, kind: EventKind, **payload: Any) -> None:
        """Reports an event that an automation may act upon; `payload` is plain JSON."""
        self._send(Event(kind=kind, payload=payload))

    def beat(self) -> None:
        """Sends a heartbeat if one is due; cheap enough for any loop."""
        self._gpus.sample()
        if not self.awaits_engine:
            self._heartbeats.offer(self._doing, ready=self._ready)

    def advance(self) -> None:
        """Notes progress within a unit of work, such as a layer's forward pass; cheap enough for any loop.

        Sends a heartbeat even while `awaits_engine`: computing is progress. Ignores calls from other threads, which
        would continue while the main thread hangs.
        """
        now = time.monotonic()
        if now - self._advanced < _ADVANCED_SECONDS or threading.current_thread() is not threading.main_thread():
            return
        self._advanced = now
        self._gpus.sample()
        self._values["advances"] = self.value("advances") + 1
        self._heartbeats.offer(self._doing, ready=self._ready)
        self._write_status()

    def mark_ready(self, line: str) -> None:
        """Reports a milestone: from here on the stage does its actual work."""
        self._ready = True
        self.update_status(now=True, t_ready=time.time())
        self.log(line)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Measures the block as loading the model, which recovery times leave out."""
        started = time.monotonic()
        self.set_activity(LOADING)
        yield
        self.update_status(load_seconds=time.monotonic() - started)

    def set_activity(self, doing: str) -> None:
        """Puts the stage's activity into its status record."""
        self._doing = doing
        self.beat()
        self._write_status()

    def update_status(self, *, now: bool = False, **values: object) -> None:
        """Updates the status record, which is written a few times per second, or `now`."""
        self._values.update(values)
        self.beat()
        if now or time.monotonic() - self._written >= _PROGRESS_SECONDS:
            self._write_status()

    def seconds(self, what: str) -> float:
        """Seconds spent on work of this kind, or `idle`, including those of its predecessors."""
        return self._seconds.get(what, 0.0)

    def value(self, name: str) -> int:
        """A count from the status record, including the predecessor's; 0 if there is none yet."""
        return int(self._values.get(name, 0))

    @property
    def reward_curve(self) -> RewardCurve:
        """The curve in the status record, including the predecessor's."""
        return list(self._values.get("reward_curve", []))

    @property
    def recent(self) -> dict[str, list[float]]:
        """The values of the last ten steps in the status record, including the predecessor's."""
        return dict(self._values.get("recent", {}))

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Counts the time of the block as work of the kind `what`."""
        started = time.monotonic()
        self._doing = what
        self.beat()
        try:
            yield
        finally:
            self._count(what, time.monotonic() - started)

    def wait(self, until: Callable[[], bool], *, why: str | Callable[[], str]) -> bool:
        """Polls until the condition holds; False if asked to drain first. `why` names the missing condition."""
        lacking = why if callable(why) else lambda: why
        self._doing = lacking()
        started = time.monotonic()
        shortest, longest = self.store.poll_seconds, self.store.poll_seconds * _MAX_POLL_GAP
        while True:
            polled, busy_before = time.monotonic(), self._busy
            if until():
                # Polling that finds something is work; polling in vain is waiting.
                self._count("loading", time.monotonic() - polled - (self._busy - busy_before))
                return True
            if not self.draining:
                # `until` may have done some other work.
                self._doing = lacking()
                self.update_status()
                time.sleep(min(max((time.monotonic() - started) * _LATENESS, shortest), longest))
            self._count("idle", time.monotonic() - polled - (self._busy - busy_before), lacking())
            if self.draining:
                return False

    def close(self) -> None:
        """Writes the last status record and the last metrics."""
        self._doing = STOPPED
        self._write_status()
        self._log_times()
        if self._metrics is not None:
            self._metrics.close()

    def _send(self, message: Message) -> None:
        try:
            send(message)
        except BrokenPipeError:
            # The controller is gone; the lifeline reports it too, a moment sooner or later.
            self.draining = True

    def _count(self, what: str, seconds: float, why: str | None = None) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds
        self._times[why or what] = self._times.get(why or what, 0.0) + seconds
        self.on_activity(why or what, seconds, what == "idle")
        if what != "idle":
            self._busy += seconds
        if time.monotonic() - self._times_logged >= _TIMES_SECONDS:
            self._log_times()

    def _log_times(self) -> None:
        """Logs the seconds per activity since the last call, the tokens so far, and the use of the machine."""
        times, self._times, self._times_logged = self._times, {}, time.monotonic()
        if not times or self.name not in _LONG_RUNNING:
            return
        values = {f"{TIME}{what}/seconds": seconds for what, seconds in times.items()}
        if "tokens" in self._values:
            values["total/tokens"] = float(self.value("tokens"))
        cpu_cores, memory_bytes = self._processes.look()
        values |= {CPU_CORES: cpu_cores, MEMORY_BYTES: float(memory_bytes), **self._gpus.look()}
        self.metrics.log(incarnation=self.value("incarnation"), policy_version=self.value("policy_version"), **values)

    def _find_run_inode(self) -> int | None:
        """The inode of `run.json`; None if it is not on a local disk, or missing."""
        path = self.store.local_path(layout.RUN)
        with suppress(OSError):
            return None if path is None else path.stat().st_ino
        return None

    def _write_status(self) -> None:
        # Otherwise the next write would make the folder again, and this stage would wait in it for ever.
        if self._run_inode is not None and self._find_run_inode() != self._run_inode:
            raise StoreRefused(
                f"{self.store.url}: {layout.RUN}, or the run's folder, was moved, deleted or replaced while this stage "
                "used it; put it back and resume the run"
            )
        self._written = time.monotonic()
        # This process's own values come last: they replace its predecessor's.
        current = {
            "pid": os.getpid(),
            "process": self.process,
            "t": time.time(),
            "attempt": self.arguments.attempt,
            "devices": self.arguments.devices,
            "doing": self._doing,
            "seconds": self._seconds,
        }
        write_progress(self.store, self.name, self.replica, {**self._values, **current})
