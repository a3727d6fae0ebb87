"""The files of a profiled run. Does not import torch.

profile.json                  which steps to record; written before the stages start
profile/<stage>-<r>.json.gz   the trace of one process in Chrome's format, its times in Unix microseconds
profile/trace.json.gz         all of them in one file, which https://ui.perfetto.dev opens
"""

import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from storage import layout
from storage.errors import NotInStore
from storage.stores.base import Store

Event = dict[str, Any]
"""An event of Chrome's trace format; `ts` and `dur` are microseconds."""
WAITING = "waiting"
"""Category of the time that a stage waits, in the events that a recorder adds; `WORKING` is that of its activities."""
WORKING = "working"
_MERGED = "trace"
_COMPRESSION = 4


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Which optimizer steps the stages record."""

    after_version: int
    """Recording begins when the trainer has made this policy version, and when a generator gets it."""
    num_steps: int

    @property
    def end_version(self) -> int:
        """The policy version with which recording ends."""
        return self.after_version + self.num_steps

    def write(self, store: Store) -> None:
        """Stores the request in a run that has not started yet."""
        store.put(layout.PROFILE_REQUEST, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, store: Store) -> "ProfileRequest | None":
        """The run's request; None if it is not profiled."""
        try:
            return cls(**json.loads(bytes(store.get(layout.PROFILE_REQUEST))))
        except NotInStore:
            return None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The recording of one process."""

    process: str
    """Such as `train-0`."""
    thread: int
    """Id of its main thread."""
    threads: int
    """Number of threads of an operator on the CPU."""
    dtype: str
    """Number format of its matrix products, such as `float32`."""
    start: float
    """Unix microseconds, as `end`."""
    end: float
    num_steps: int
    """Optimizer steps that were finished between `start` and `end`; of a generator, versions that it got."""
    events: list[Event]

    def write(self, store: Store) -> None:
        """Stores the trace in its run."""
        values = asdict(self)
        events = values.pop("events")
        _put(store, self.process, {"traceEvents": events, "displayTimeUnit": "ms", "millrace": values})


def read_traces(store: Store) -> list[Trace]:
    """The traces of a profiled run, sorted by process, the trainer's last."""
    paths = [path for path in store.list(layout.PROFILE) if path != layout.profile_trace(_MERGED)]
    contents = [json.loads(gzip.decompress(store.get(path))) for path in paths]
    return [Trace(**content["millrace"], events=content["traceEvents"]) for content in contents]


def write_merged(store: Store, traces: Iterable[Trace]) -> str:
    """Stores all traces in one file; returns its path in the store."""
    events = [event for trace in traces for event in trace.events]
    return _put(store, _MERGED, {"traceEvents": events, "displayTimeUnit": "ms"})


def _put(store: Store, name: str, content: dict[str, Any]) -> str:
    path = layout.profile_trace(name)
    store.put(path, gzip.compress(json.dumps(content).encode(), _COMPRESSION))
    return path
