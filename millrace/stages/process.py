"""What every stage process has in common: how it is started, watched, drained and heard.

    supervisor ──stdin (lifeline)──► stage        end of file: the controller is gone   ┬─► `draining` is set
               ──SIGTERM──────────►               asked to stop                         ┘
               ──SIGUSR1──────────►               it seems to hang: the stacks of its threads, into its log
               ◄──stdout───────────               milestones, events, beats: a line each, see `millrace.events`
               ◄──exit code────────               see `millrace.exits`; anything else is a fault

A stage's loop looks at `draining` between two units of work, finishes the one it is at, commits, and returns. Its main
thread beats whenever it begins something, has done something, or looks in vain for what it waits for.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from configs.schema import RunConfig
from millrace.errors import InputError, LedgerMismatch
from millrace.events import LOADING, STARTING, STOPPED, Beat, Event, EventKind, event_line, milestone_line
from millrace.exits import DRAINED, FENCED, LAST_WORDS, MISCOUNTED, MISTAKE, SHOW_STACKS
from millrace.run import read_attempt
from millrace.stages.arguments import StageArguments
from millrace.stages.metrics import MetricsWriter
from millrace.stages.voice import Pulse, keep_apart, speak
from storage import failpoints
from storage.errors import Fenced, PartRemoved, SchemaUnknown, StoreDenied, StoreFull, StoreRefused, StreamCorrupt
from storage.factory import open_store
from storage.progress import read_progress, write_progress
from storage.store import Store

_PROGRESS_SECONDS = 0.25
_LANE_SECONDS = 2.0
_WITH_LANES = frozenset({"generate", "score", "train", "sync_weights"})
"""Stages that run as long as the campaign: what their time went into is a history worth having."""

_FOR_A_PERSON = (InputError, StoreRefused, StoreDenied, StoreFull, StreamCorrupt, SchemaUnknown, PartRemoved)
_CODES: dict[type[Exception], int] = {
    **dict.fromkeys(_FOR_A_PERSON, MISTAKE),
    Fenced: FENCED,
    LedgerMismatch: MISCOUNTED,
}
"""Errors that end a stage with one sentence, and for good: a restart would not help."""


@dataclass(kw_only=True)
class Stage:
    """A running stage process: where its run lies, whether it should stop, and its signs of life."""

    name: str
    arguments: StageArguments
    config: RunConfig
    store: Store
    draining: bool = False
    """Asked to stop. A bare flag: a signal handler that sets an Event hangs if it interrupts that Event's own wait."""
    owing: bool = False
    """While set, nothing the stage does is a sign that it gets on: it waits for what its own work must bring."""

    def __post_init__(self) -> None:
        key = f"{self.name}-{self.replica}"
        before = read_progress(self.store).get(key, {})
        # Seconds and counts go on where the predecessor's last sign of life left them.
        self._seconds: dict[str, float] = dict(before.get("seconds", {}))
        self._values: dict[str, object] = before
        self._doing = STARTING
        self._ready = False
        self._busy = 0.0
        self._lane: dict[str, float] = {}
        self._lane_logged = time.monotonic()
        self._written = 0.0
        self._pulse = Pulse()
        self._metrics: MetricsWriter | None = None

    @property
    def replica(self) -> int:
        """Which of the stage's processes this is, from 0."""
        return self.arguments.replica

    @property
    def metrics(self) -> MetricsWriter:
        """This process's metrics stream, opened at first use."""
        if self._metrics is None:
            self._metrics = MetricsWriter(self.store, self.name, self.replica)
        return self._metrics

    def milestone(self, line: str) -> None:
        """Says something worth a line in the Prefect UI."""
        with self._heard():
            speak(milestone_line(line))

    def tell(self, kind: EventKind, **payload: Any) -> None:
        """Says that something happened which an automation may act upon; `payload` is plain JSON."""
        with self._heard():
            speak(event_line(Event(kind=kind, payload=payload)))

    def beat(self) -> None:
        """Says that the main thread gets on, and at what it is; cheap enough for any loop."""
        if not self.owing:
            with self._heard():
                self._pulse.beat(Beat(doing=self._doing, ready=self._ready))

    def ready(self, line: str) -> None:
        """A milestone: from here on the stage does what it is there for."""
        self._ready = True
        self.progress(now=True, t_ready=time.time())
        self.milestone(line)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The time within is that of loading the model, which a recovery is told without."""
        started = time.monotonic()
        self.say(LOADING)
        yield
        self.progress(load_seconds=time.monotonic() - started)

    def say(self, doing: str) -> None:
        """Says what the stage is at, in its sign of life."""
        self._doing = doing
        self.beat()
        self._write_progress()

    def progress(self, *, now: bool = False, **values: object) -> None:
        """Updates the sign of life; written a few times a second, or `now`."""
        self._values.update(values)
        self.beat()
        if now or time.monotonic() - self._written >= _PROGRESS_SECONDS:
            self._write_progress()

    def value(self, name: str) -> int:
        """A count from the sign of life, the predecessor's included; 0 if there is none yet."""
        found = self._values.get(name, 0)
        assert isinstance(found, int)
        return found

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Counts the time within as work of the kind `what`."""
        started = time.monotonic()
        self._doing = what
        self.beat()
        try:
            yield
        finally:
            self._count(what, time.monotonic() - started)

    def wait(self, until: Callable[[], bool], *, why: str) -> bool:
        """Polls until the condition holds; False if the stage was asked to drain first. `why` says what is missing."""
        self._doing = why
        while True:
            looked, busy_before = time.monotonic(), self._busy
            if until():
                # The look that found something is work; those in vain are waiting.
                self._count("intake", time.monotonic() - looked - (self._busy - busy_before))
                return True
            if not self.draining:
                # The look may have had something else to do.
                self._doing = why
                self.progress()
                time.sleep(self.store.poll_seconds)
            self._count("idle", time.monotonic() - looked - (self._busy - busy_before), why)
            if self.draining:
                return False

    def close(self) -> None:
        """The last sign of life, and the last metrics."""
        self._doing = STOPPED
        self._write_progress()
        self._log_lane()
        if self._metrics is not None:
            self._metrics.close()

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Asks the stage to drain where nobody hears what is said within."""
        try:
            yield
        except BrokenPipeError:
            # The controller is gone; its lifeline says so too, a moment sooner or later.
            self.draining = True

    def _count(self, what: str, seconds: float, why: str | None = None) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds
        self._lane[why or what] = self._lane.get(why or what, 0.0) + seconds
        if what != "idle":
            self._busy += seconds
        if time.monotonic() - self._lane_logged >= _LANE_SECONDS:
            self._log_lane()

    def _log_lane(self) -> None:
        """Measures what the time since the last such measurement went into, and how many tokens there are by now."""
        lane, self._lane, self._lane_logged = self._lane, {}, time.monotonic()
        if not lane or self.name not in _WITH_LANES:
            return
        values = {f"lane/{what}/seconds": seconds for what, seconds in lane.items()}
        if "tokens" in self._values:
            values["total/tokens"] = float(self.value("tokens"))
        self.metrics.log(incarnation=self.value("incarnation"), policy_version=self.value("policy_version"), **values)

    def _write_progress(self) -> None:
        self._written = time.monotonic()
        # What is this process's own comes last: over what its predecessor left.
        own = {
            "pid": os.getpid(),
            "t": time.time(),
            "attempt": self.arguments.attempt,
            "doing": self._doing,
            "seconds": self._seconds,
        }
        write_progress(self.store, self.name, self.replica, {**self._values, **own})


def run_stage(name: str, main: Callable[[Stage], None]) -> None:
    """Entry point of a stage process: sets it up from its command line, runs `main`, and exits.

    Exits with 0 when `main` returns of itself, else as `millrace.exits` says; an exception that has no exit code of its
    own is a fault and leaves its traceback.
    """
    with _last_words():
        arguments, config, store = _begin(name)
        stage = Stage(name=name, arguments=arguments, config=config, store=store)
        stop_on_signals(stage)
        _stop_with_the_lifeline(stage)
        stage.progress(now=True, t_main=time.time(), t_ready=None, load_seconds=0.0)
        try:
            main(stage)
        finally:
            stage.close()
    sys.exit(DRAINED if stage.draining else 0)


def run_follower(name: str, rank: int, follow: Callable[[StageArguments, RunConfig, Store], None]) -> None:
    """Entry point of a rank of a stage that follows rank 0, which alone gives signs of life and is asked to stop.

    So SIGTERM ends this one at once: it comes of torchrun, where another rank has failed.
    """
    with _last_words():
        arguments, config, store = _begin(name, rank)
        follow(arguments, config, store)


def _begin(name: str, rank: int = 0) -> tuple[StageArguments, RunConfig, Store]:
    """What this process is to do, as its command line and its run say."""
    keep_apart()
    faulthandler.register(SHOW_STACKS)
    arguments = StageArguments.parse(sys.argv[1:])
    failpoints.arm(f"{name}-{arguments.replica}{f'.{rank}' if rank else ''}")
    config = RunConfig.model_validate(read_attempt(open_store(arguments.run_url), arguments.attempt).config)
    return arguments, config, open_store(arguments.run_url, fsync=config.storage.fsync)


@contextmanager
def _last_words() -> Iterator[None]:
    """Says the sentence of an error that has an exit code of its own, and exits with that."""
    try:
        yield
    except tuple(_CODES) as error:
        speak(milestone_line(f"{LAST_WORDS}{error}"))
        sys.exit(next(code for kind, code in _CODES.items() if isinstance(error, kind)))


def stop_on_signals(stage: Stage) -> None:
    """Asks the stage to drain on SIGTERM; call it in the main thread."""

    def drain(signal_number: int, frame: FrameType | None) -> None:
        stage.draining = True

    signal.signal(signal.SIGTERM, drain)
    # The controller alone answers Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stop_with_the_lifeline(stage: Stage) -> None:
    """Asks the stage to drain when standard input ends, which the controller holds open."""

    def watch() -> None:
        # os.read, because a thread inside sys.stdin's buffer aborts the interpreter at exit.
        while os.read(0, 1024):
            pass
        stage.draining = True

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
