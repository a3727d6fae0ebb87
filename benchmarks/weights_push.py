"""Pushes of one kind, timed: by the trainer, which this process is, by sync_weights and by a generator.

    trainer        ├─ copy ─┤
    sync_weights     hashes ├─ hash ─┤ offers                            what is left when the trainer has done
    generator                        ├─ travel ─┤─ verify ─┤─ load ─┤    travel: the offer, until the look that finds it
                   ├──────────────────── live ─────────────────────┤

    floor          two copies of the same bytes, from memory to memory that is there already, by the trainer

Before each push the floor is measured, and a share of it is that of the round. All have the clock CLOCK_MONOTONIC.
"""

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from benchmarks.timing import median_ratio
from benchmarks.weights_ends import Route
from benchmarks.weights_policy import FlippedPolicy, Policy, Shapes, TrainedPolicy, llama_shapes
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.fingerprint import fingerprint
from millrace.weights.shm import HandoverWriter
from storage import layout

if TYPE_CHECKING:
    from storage.store import Store

WAYS = ("shm", "broadcast", "store", "memory", "delta")
"""`store` is a folder, `memory` a store in memory, `delta` the folder again with versions as a trainer makes them."""

PARTS = ("copy", "hash", "travel", "verify", "load")
"""What lies between the hand-over and the version's life, one behind the other: see the picture."""

_WARM_UP = 2
_COPIES = {"shm": 6, "broadcast": 8, "store": 12, "memory": 13, "delta": 19}
"""How often the bytes of the weights lie in memory at the worst moment, all processes together."""
_HOST_COPIES_OF_CUDA = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is pushed, and how."""

    num_parameters: int
    """About."""
    dtype: str
    """`float32` or `bfloat16`."""
    way: str
    """One of WAYS."""
    device: str = "cpu"
    """Where trainer and generator have their parameters: `cpu` or `cuda`."""

    @property
    def shapes(self) -> Shapes:
        """Of the parameters."""
        return llama_shapes(self.num_parameters)

    @property
    def memory_bytes(self) -> int:
        """About how much of the host's memory it takes."""
        num_parameters = sum(torch.Size(shape).numel() for shape in self.shapes.values())
        copies = _COPIES[self.way] if self.device == "cpu" else _HOST_COPIES_OF_CUDA
        itemsize: int = getattr(torch, self.dtype).itemsize
        return copies * num_parameters * itemsize


def measure_pushes(case: Case, *, memory: Path, disk: Path, num_pushes: int) -> dict[str, Any]:
    """Seconds, medians over so many pushes, and `all_seconds`; shares of the floor; bytes on the wire.

    In the folder `memory`, which is in shared memory, versions are handed over; in `disk` the folder of a store is
    made. Nothing is left in either.
    """
    run = f"benchmark-{uuid.uuid4().hex}"
    folder = memory / run
    folder.mkdir()
    route = Route(
        transport=case.way if case.way in ("shm", "broadcast") else "store",
        folder=str(folder),
        store=f"memory://{run}" if case.way == "memory" else str(disk / run),
        device=case.device,
    )
    policy = TrainedPolicy(case.shapes) if case.way == "delta" else _flipped(case)
    try:
        with _ends(route) as (sync, generator):
            pushes = _Pushes(policy, route, sync, generator)
            rounds = [pushes.push(keep=case.way == "delta") for _ in range(_WARM_UP + num_pushes)][_WARM_UP:]
            pushes.close()
    finally:
        shutil.rmtree(folder)
        if route.transport == "store":
            shutil.rmtree(_folder(route))
    return _summary(case, policy, rounds)


class _Pushes:
    """The trainer's side of one route."""

    def __init__(self, policy: Policy, route: Route, sync: IO[str], generator: IO[str]) -> None:
        self._policy = policy
        self._route = route
        self._sync = sync
        self._generator = generator
        self._writer = HandoverWriter(route.handover, policy.tensors, num_generators=1)
        # Touched, for what is copied into it here is not counted.
        self._spare = {name: tensor.cpu().clone() for name, tensor in policy.tensors.items()}
        self._version = 0

    def push(self, *, keep: bool) -> dict[str, float]:
        """The next version; `seconds` by name, and `wire_bytes`. `keep`: the store's files of this one are needed."""
        self._policy.step()
        self._version += 1
        # There and back: the same bytes again, and with a GPU both directions.
        there = _seconds_to_copy(self._policy.tensors, self._spare)
        back = _seconds_to_copy(self._spare, self._policy.tensors)
        manifest = Manifest(id=WeightsId(incarnation=0, policy_version=self._version, t_offered=time.time()))
        called = time.monotonic()
        self._writer.offer(Weights(manifest=manifest, tensors=self._policy.tensors))
        returned = time.monotonic()
        generator, sync = _heard(self._generator), _heard(self._sync)
        if not generator["digest"] == sync["digest"] == fingerprint(self._policy.tensors).digest:
            raise RuntimeError(f"version {self._version} is not the same everywhere: a transport has damaged it")
        return {
            "floor": there + back,
            "memcpy": (there + back) / 2,
            "live": generator["live"] - called,
            "copy": returned - called,
            "hash": sync["taken"] - returned,
            "travel": generator["found"] - sync["taken"],
            "verify": generator["taken"] - generator["found"],
            "load": generator["live"] - generator["taken"],
            "offer": sync["offered"] - sync["taken"],
            "wire_bytes": self._wire_bytes(keep=keep),
        }

    def close(self) -> None:
        """Lets go of the handover."""
        self._writer.close()

    def _wire_bytes(self, *, keep: bool) -> int:
        """Of the version pushed last."""
        if self._route.transport != "store":
            nbytes = sum(tensor.nbytes for tensor in self._policy.tensors.values())
            return nbytes if self._route.transport == "broadcast" else 0
        store = _store(self._route)
        files = [entry for entry in store.entries(layout.WEIGHTS) if f"/data/{self._version:08d}-" in entry.path]
        if not keep:
            for entry in files:
                store.delete(entry.path)
        return sum(entry.bytes for entry in files)


def _flipped(case: Case) -> FlippedPolicy:
    return FlippedPolicy(case.shapes, getattr(torch, case.dtype), case.device)


def _seconds_to_copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> float:
    started = time.monotonic()
    for name, tensor in source.items():
        target[name].copy_(tensor)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


@contextmanager
def _ends(route: Route) -> Iterator[tuple[IO[str], IO[str]]]:
    """sync_weights and a generator, ready; what they say."""
    started: list[subprocess.Popen[str]] = []
    try:
        sync = _start("sync", route, started)
        found = dataclasses.replace(route, address=_heard(sync)["address"])
        generator = _start("generator", found, started)
        _heard(generator)
        yield sync, generator
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def _start(end: str, route: Route, started: list[subprocess.Popen[str]]) -> IO[str]:
    command = [sys.executable, "-m", "benchmarks.weights_ends", end, route.to_json()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    started.append(process)
    assert process.stdout is not None
    return process.stdout


def _heard(end: IO[str]) -> dict[str, Any]:
    line = end.readline()
    if not line:
        raise RuntimeError("a process of the benchmark ended early; what it printed says why")
    said: dict[str, Any] = json.loads(line)
    return said


def _store(route: Route) -> "Store":
    # Late: shared memory alone needs none of what stores need.
    from storage.factory import open_store

    return open_store(route.store)


def _folder(route: Route) -> Path:
    folder = _store(route).local_path("")
    assert folder is not None
    return folder


def _summary(case: Case, policy: Policy, rounds: list[dict[str, float]]) -> dict[str, Any]:
    times = {name: [one[name] for one in rounds] for name in rounds[0]}
    wire_bytes = statistics.median(times.pop("wire_bytes"))
    nbytes = sum(tensor.nbytes for tensor in policy.tensors.values())
    without_travel = [live - travel for live, travel in zip(times["live"], times["travel"], strict=True)]
    return {
        "parameters": sum(tensor.numel() for tensor in policy.tensors.values()),
        "tensors": len(policy.tensors),
        "dtype": case.dtype,
        "way": case.way,
        "device": case.device,
        "bytes": nbytes,
        "wire_bytes": wire_bytes,
        "saved": nbytes / wire_bytes if case.way == "delta" else None,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "of_floor": median_ratio(times["floor"], times["live"]),
        # By the other ways it is the travel that one wants to know.
        "of_floor_without_travel": median_ratio(times["floor"], without_travel) if case.way == "shm" else None,
        "stall_over_memcpy": median_ratio(times["copy"], times["memcpy"]),
        "all_seconds": times,
    }
