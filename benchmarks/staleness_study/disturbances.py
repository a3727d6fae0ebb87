"""What slows a stage of a running campaign down for some steps, from outside: its processes are stopped and continued.

    status of train ─► in a phase's steps? ─► SIGSTOP, a while ─► SIGCONT, a while ─┐
          ▲                                                                         │
          └─────────────────────────────────────────────────────────────────────────┘

A stopped process needs no change to the product and holds no core. A generator that runs a quarter of the time is four
times slower; a scorer that rests for seconds between bursts has the latency of a slow reward and nearly its throughput.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from storage.progress import read_status
from storage.stores.factory import open_store

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some steps of a campaign in which one stage is slow."""

    name: str
    stage: str
    first: int
    """Policy version at which it begins."""
    last: int
    """Policy version at which it is over."""
    stopped_seconds: float
    running_seconds: float


@contextmanager
def disturbed(run: Path, phases: Sequence[Phase]) -> Iterator[None]:
    """Slows stages of the campaign in the folder `run` down while this is open, as its phases say."""
    over = threading.Event()
    thread = threading.Thread(target=_disturb, args=(run, phases, over), name="disturbances")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _disturb(run: Path, phases: Sequence[Phase], over: threading.Event) -> None:
    while not over.wait(_LOOK_SECONDS):
        store = open_store(str(run))
        version = read_status(store, "train", 0).get("policy_version", 0)
        for phase in phases:
            record = read_status(store, phase.stage, 0)
            if phase.first <= version < phase.last and record:
                _rest(record["pid"], phase)


def _rest(pid: int, phase: Phase) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(phase.stopped_seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(max(0.0, phase.running_seconds - _LOOK_SECONDS))
