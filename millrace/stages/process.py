"""What every stage process has in common: how it is started, watched, drained and heard.

    supervisor ──stdin (lifeline)──► stage        end of file: the controller is gone   ┐
               ──SIGTERM──────────►               asked to stop                         ├─► `draining` is set
               ◄──stdout───────────               milestones, a line each               ┘
               ◄──exit code────────               see `millrace.exits`; anything else is a fault

A stage's loop looks at `draining` between two units of work, finishes the one it is at, commits, and returns.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

import pyarrow as pa

from configs.schema import RunConfig
from millrace.errors import InputError, LedgerMismatch
from millrace.exits import DRAINED, FENCED, LAST_WORDS, MISCOUNTED, MISTAKE
from millrace.run import read_attempt
from millrace.stages.arguments import StageArguments
from storage import failpoints, layout
from storage.errors import Fenced, PartRemoved, SchemaUnknown, StoreDenied, StoreFull, StoreRefused, StreamCorrupt
from storage.factory import open_store
from storage.group_commit import GroupCommit
from storage.progress import read_progress, write_progress
from storage.schema import METRIC
from storage.store import Store
from storage.stream import StreamWriter

_PROGRESS_SECONDS = 0.25
_METRICS_SECONDS, _METRICS_ROWS, _METRICS_BYTES = 1.0, 4096, 1 << 20


# Where milestones go, once `_keep_milestones_apart` has been called; None: standard output.
_milestones: TextIO | None = None

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

    def __post_init__(self) -> None:
        key = f"{self.name}-{self.replica}"
        before = read_progress(self.store).get(key, {})
        # Seconds and counts go on where the predecessor's last sign of life left them.
        self._seconds: dict[str, float] = dict(before.get("seconds", {}))
        self._values: dict[str, object] = before
        self._doing = "starting"
        self._busy = 0.0
        self._written = 0.0
        self._metrics: MetricsWriter | None = None

    @property
    def replica(self) -> int:
        """Which of the stage's processes this is, from 0."""
        return self.arguments.replica

    @property
    def metrics(self) -> "MetricsWriter":
        """This process's metrics stream, opened at first use."""
        if self._metrics is None:
            self._metrics = MetricsWriter(self.store, self.name, self.replica)
        return self._metrics

    def milestone(self, line: str) -> None:
        """Says something worth a line in the Prefect UI."""
        try:
            print(line, file=_milestones, flush=True)
        except BrokenPipeError:
            # The controller is gone; its lifeline says so too, a moment sooner or later.
            self.draining = True

    def ready(self, line: str) -> None:
        """A milestone: from here on the stage does what it is there for."""
        self.progress(now=True, t_ready=time.time())
        self.milestone(line)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The time within is that of loading the model, which a recovery is told without."""
        started = time.monotonic()
        self.say("loading the model")
        yield
        self.progress(load_seconds=time.monotonic() - started)

    def say(self, doing: str) -> None:
        """Says what the stage is at, in its sign of life."""
        self._doing = doing
        self._write_progress()

    def progress(self, *, now: bool = False, **values: object) -> None:
        """Updates the sign of life; written a few times a second, or `now`."""
        self._values.update(values)
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
        try:
            yield
        finally:
            self._count(what, time.monotonic() - started)

    def wait(self, until: Callable[[], bool], *, why: str) -> bool:
        """Polls until the condition holds; False if the stage was asked to drain first. `why` says what is missing."""
        started = time.monotonic()
        busy_before = self._busy
        self._doing = why
        try:
            while True:
                looked = time.monotonic()
                busy_inside = self._busy
                if until():
                    # The look that found something is work; those in vain are waiting.
                    self._count("intake", time.monotonic() - looked - (self._busy - busy_inside))
                    return True
                if self.draining:
                    return False
                self.progress()
                time.sleep(self.store.poll_seconds)
        finally:
            self._count("idle", time.monotonic() - started - (self._busy - busy_before))

    def close(self) -> None:
        """The last sign of life, and the last metrics."""
        self._doing = "stopped"
        self._write_progress()
        if self._metrics is not None:
            self._metrics.close()

    def _count(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds
        if what != "idle":
            self._busy += seconds

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


class MetricsWriter:
    """Collects measurements and commits them about once a second to the stage's `metrics` stream."""

    def __init__(self, store: Store, stage: str, replica: int) -> None:
        stream = StreamWriter(store, layout.metrics(stage, replica), METRIC, writer=f"{stage}-{replica}")
        self._commits = GroupCommit(
            stream, max_rows=_METRICS_ROWS, max_bytes=_METRICS_BYTES, max_seconds=_METRICS_SECONDS
        )

    def log(self, *, incarnation: int, policy_version: int, **values: float) -> None:
        """Measurements of now, each a row; names end in their unit where they have one."""
        now = time.time()
        rows = [
            {
                "t": now,
                "incarnation": incarnation,
                "policy_version": policy_version,
                "name": name,
                "value": float(value),
            }
            for name, value in values.items()
        ]
        self._commits.append(pa.Table.from_pylist(rows, schema=METRIC), tokens=0)

    def close(self) -> None:
        """Commits what is left."""
        self._commits.close()


def run_stage(name: str, main: Callable[[Stage], None]) -> None:
    """Entry point of a stage process: sets it up from its command line, runs `main`, and exits.

    Exits with 0 when `main` returns of itself, else as `millrace.exits` says; an exception that has no exit code of its
    own is a fault and leaves its traceback.
    """
    arguments = StageArguments.parse(sys.argv[1:])
    _keep_milestones_apart()
    try:
        failpoints.arm(f"{name}-{arguments.replica}")
        config = RunConfig.model_validate(read_attempt(open_store(arguments.run_url), arguments.attempt).config)
        store = open_store(arguments.run_url, fsync=config.storage.fsync)
        stage = Stage(name=name, arguments=arguments, config=config, store=store)
        stop_on_signals(stage)
        _stop_with_the_lifeline(stage)
        stage.progress(now=True, t_main=time.time(), t_ready=None, load_seconds=0.0)
        try:
            main(stage)
        finally:
            stage.close()
    except tuple(_CODES) as error:
        print(f"{LAST_WORDS}{error}", file=_milestones, flush=True)
        sys.exit(next(code for kind, code in _CODES.items() if isinstance(error, kind)))
    sys.exit(DRAINED if stage.draining else 0)


def stop_on_signals(stage: Stage) -> None:
    """Asks the stage to drain on SIGTERM; call it in the main thread."""

    def drain(signal_number: int, frame: FrameType | None) -> None:
        stage.draining = True

    signal.signal(signal.SIGTERM, drain)
    # The controller alone answers Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _keep_milestones_apart() -> None:
    """What libraries and their processes print goes to the stage's log, not among its milestones."""
    global _milestones
    _milestones = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def _stop_with_the_lifeline(stage: Stage) -> None:
    """Asks the stage to drain when standard input ends, which the controller holds open."""

    def watch() -> None:
        # os.read, because a thread inside sys.stdin's buffer aborts the interpreter at exit.
        while os.read(0, 1024):
            pass
        stage.draining = True

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
