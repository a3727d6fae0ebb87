"""Records a stage with torch's profiler between two policy versions.

    trainer     ── version a ──► record … ── version b ──► stop        a, b: of the run's request
    generator   ── gets a or a later one ──► record … ── gets b, or drains ──► stop

Operators and kernels come from the profiler. The stage adds its activities and its waits.
"""

import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from millrace.profiling.trace import WAITING, WORKING, Event, ProfileRequest, Trace
from millrace.runtime.stage import Stage

_STAGE_TRACK = 0
"""Thread id of the events that the recorder adds."""
_PEAK_SIZE = {"cpu": 1024, "cuda": 8192}
_PEAK_ROUNDS = 10


@contextmanager
def profiled(stage: Stage, dtype: str) -> Iterator[None]:
    """Records the stage's loop if the run has a request, and writes its trace at the end; otherwise does nothing.

    `dtype` is the number format of its matrix products.
    """
    request = ProfileRequest.read(stage.store)
    if request is None:
        yield
        return
    recorder = _Recorder(stage, request)
    stage.on_version, stage.on_activity = recorder.at_version, recorder.add_activity
    yield
    recorder.finish(dtype)


class _Recorder:
    """The profiler of one process, and the activities of its stage meanwhile."""

    def __init__(self, stage: Stage, request: ProfileRequest) -> None:
        self._stage = stage
        self._request = request
        self._profile = profile(record_shapes=True)
        self._prepared = self._stopped = False
        # Version and Unix microseconds of each version since recording began.
        self._versions: list[tuple[int, float]] = []
        self._activities: list[Event] = []

    def at_version(self, version: int) -> None:
        """Starts or stops at the versions of the request."""
        if self._stopped or version < self._request.after_version - 1:
            return
        if not self._prepared and version < self._request.end_version:
            # A step early: starting CUPTI takes seconds.
            self._prepared = True
            self._profile.prepare_trace()
        if not self._versions and self._request.after_version <= version < self._request.end_version:
            self._profile.start_trace()
        elif not self._versions:
            return
        self._versions.append((version, _now()))
        if version >= self._request.end_version:
            self._stop()

    def add_activity(self, what: str, seconds: float, waits: bool) -> None:
        """Notes that the stage has done, or waited for, `what` in the last `seconds`."""
        if self._versions and not self._stopped:
            place = {"ts": _now() - seconds * 1e6, "dur": seconds * 1e6, "pid": os.getpid(), "tid": _STAGE_TRACK}
            self._activities.append({"ph": "X", "cat": WAITING if waits else WORKING, "name": what, **place})

    def finish(self, dtype: str) -> None:
        """Writes the trace, if anything was recorded. The time of a step that was not finished does not count."""
        if not self._versions:
            return
        stopped_at = self._versions[-1][1] if self._stopped or self._stage.name == "train" else _now()
        if not self._stopped:
            self._stop()
        # A million events take half a minute, and longer on a busy machine: each part of the work is progress.
        self._stage.set_activity("writing the trace")
        self._stage.advance()
        name = f"{self._stage.name}-{self._stage.replica}"
        trace = Trace(
            process=name,
            thread=threading.get_native_id(),
            threads=torch.get_num_threads(),
            dtype=dtype,
            start=self._versions[0][1],
            end=stopped_at,
            num_steps=self._versions[-1][0] - self._versions[0][0],
            events=[*_described(name), *self._activities, *self._exported(name)],
        )
        self._stage.advance()
        trace.write(self._stage.store)

    def _stop(self) -> None:
        self._stopped = True
        self._profile.stop_trace()

    def _exported(self, process: str) -> list[Event]:
        """The profiler's events, in Unix microseconds. Tracks of GPUs are named after the process: none collide."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self._stage.advance()
            # Collecting garbage among so many new objects would take four times as long as parsing them.
            gc.disable()
            content: dict[str, Any] = json.loads(path.read_bytes())
            gc.enable()
        self._stage.advance()
        base = content["baseTimeNanoseconds"] / 1000
        events = []
        for event in content["traceEvents"]:
            if "ts" in event:
                event["ts"] += base
            if event.get("pid") != os.getpid():
                event["pid"] = f"{process} {event.get('pid')}"
            elif event["ph"] == "M" and event["name"] == "process_name":
                continue
            events.append(event)
        return events


@cache
def matmul_flops_per_second(dtype: str, device: str, threads: int) -> float:
    """The highest rate of a square matrix product on this machine, floating-point operations per second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    size = _PEAK_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    seconds = []
    for _ in range(_PEAK_ROUNDS):
        started = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return 2 * size**3 / min(seconds)


def _now() -> float:
    return time.time_ns() / 1000


def _described(process: str) -> list[Event]:
    """Names of the process and of the track of its activities."""
    track = {"ph": "M", "pid": os.getpid(), "tid": _STAGE_TRACK}
    return [
        {**track, "name": "process_name", "args": {"name": process}},
        {**track, "name": "thread_name", "args": {"name": "stage"}},
    ]
