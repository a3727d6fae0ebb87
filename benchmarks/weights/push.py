"""Pushes of one kind, timed: by the trainer, which is this process, by sync_weights and by a generator.

    trainer        ├─ copy ─┤
    sync_weights     hashes ├─ hash ─┤ offers                            what is left when the trainer is done
    generator                        ├─ travel ─┤─ verify ─┤─ load ─┤    travel: the offer, until the look that finds it
                   ├──────────────────── live ─────────────────────┤

    floor          two copies of the same bytes, from memory to memory that exists already, by the trainer

The floor is measured before each push, and a share of it is that of the round. All use the clock CLOCK_MONOTONIC.
"""

import shutil
import statistics
import time
import uuid
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import median_ratio
from benchmarks.weights.policy import FlippedPolicy, Policy, Shapes, TrainedPolicy, llama_shapes
from benchmarks.weights.processes import Setup, next_report, started
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.fingerprint import fingerprint
from millrace.weights.shm import ShmSender
from storage import layout

if TYPE_CHECKING:
    from storage.stores.base import Store

PARTS = ("copy", "hash", "travel", "verify", "load")
"""The parts of "live", one after the other: see the picture."""

_WARM_UP = 2
_COPIES = {"shm": 6, "store": 12, "memory": 13, "delta": 19}
"""How often the bytes of the weights are in memory at the worst moment, in all processes together."""
_HOST_COPIES_OF_CUDA = 4
_COPY_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class PushCase:
    """A policy, and a way to push it."""

    num_parameters: int
    """About."""
    dtype: str
    """`float32` or `bfloat16`."""
    way: str
    """`shm`; `store`, a folder; `memory`, a store in memory; `delta`, the folder again with versions as a
    trainer makes them."""
    device: str = "cpu"
    """Where trainer and generator have their parameters: `cpu` or `cuda`."""

    @property
    def shapes(self) -> Shapes:
        return llama_shapes(self.num_parameters)

    @property
    def memory_bytes(self) -> int:
        """About how much of the host's memory it takes."""
        num_parameters = sum(torch.Size(shape).numel() for shape in self.shapes.values())
        copies = _COPIES[self.way] if self.device == "cpu" else _HOST_COPIES_OF_CUDA
        itemsize: int = getattr(torch, self.dtype).itemsize
        return copies * num_parameters * itemsize

    def policy(self) -> Policy:
        """Its versions."""
        if self.way == "delta":
            return TrainedPolicy(self.shapes)
        return FlippedPolicy(self.shapes, getattr(torch, self.dtype), self.device)


def measure_pushes(case: PushCase, *, memory: Path, disk: Path, num_pushes: int) -> dict[str, Any]:
    """Seconds, medians over the pushes, and `all_seconds`; shares of the floor; bytes on the wire.

    Versions are handed over in the folder `memory`, which is in shared memory; the folder of a store is created in
    `disk`. Nothing is left in either.
    """
    run = f"benchmark-{uuid.uuid4().hex}"
    setup = Setup(
        transport="shm" if case.way == "shm" else "store",
        folder=memory / run,
        store=f"memory://{run}" if case.way == "memory" else str(disk / run),
        device=case.device,
    )
    setup.folder.mkdir()
    policy = case.policy()
    try:
        with (
            started(setup) as (sync_weights, generator),
            closing(ShmSender(setup.handover, policy.tensors, num_generators=1)) as writer,
        ):
            # Written to already, so that copies into it need not wait for pages.
            spare = {name: tensor.cpu().clone() for name, tensor in policy.tensors.items()}
            rounds = []
            for version in range(1, 1 + _WARM_UP + num_pushes):
                policy.step()
                round_trip = _seconds_to_copy(policy.tensors, spare) + _seconds_to_copy(spare, policy.tensors)
                times = _push(version, policy, writer, sync_weights, generator)
                wire_bytes = _wire_bytes(setup, policy, version, keep=case.way == "delta")
                rounds.append(times | {"floor": round_trip, "memcpy": round_trip / 2, "wire_bytes": wire_bytes})
    finally:
        shutil.rmtree(setup.folder)
        if setup.transport == "store" and (folder := _store(setup).local_path("")) is not None:
            shutil.rmtree(folder)
    return _summary(case, policy, rounds[_WARM_UP:])


def _push(
    version: int, policy: Policy, writer: ShmSender, sync_weights: Connection, generator: Connection
) -> dict[str, float]:
    """Pushes a version; seconds by name."""
    manifest = Manifest(id=WeightsId(incarnation=0, policy_version=version, t_offered=time.time()))
    called = time.monotonic()
    writer.publish(Weights(manifest=manifest, tensors=policy.tensors))
    returned = time.monotonic()
    loaded, pushed = next_report(generator), next_report(sync_weights)
    if not loaded["digest"] == loaded["loaded"] == pushed["digest"] == fingerprint(policy.tensors).digest:
        raise RuntimeError(f"version {version} is not the same everywhere: a transport has damaged it")
    return {
        "live": loaded["live"] - called,
        "copy": returned - called,
        "hash": pushed["taken"] - returned,
        "travel": loaded["found"] - pushed["taken"],
        "verify": loaded["taken"] - loaded["found"],
        "load": loaded["live"] - loaded["taken"],
        "offer": pushed["offered"] - pushed["taken"],
    }


def _wire_bytes(setup: Setup, policy: Policy, version: int, *, keep: bool) -> int:
    """Cost of this version, pushed last, on the wire. `keep`: later versions need its files in the store."""
    if setup.transport != "store":
        return 0
    store = _store(setup)
    files = [entry for entry in store.entries(layout.WEIGHTS) if f"/data/{version:08d}-" in entry.path]
    if not keep:
        for entry in files:
            store.delete(entry.path)
    return sum(entry.bytes for entry in files)


def _seconds_to_copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> float:
    started = time.monotonic()
    for name, tensor in source.items():
        target[name].copy_(tensor)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


def _store(setup: Setup) -> "Store":
    # Late: shared memory alone needs none of what stores need.
    from storage.stores.factory import open_store

    return open_store(setup.store)


def _summary(case: PushCase, policy: Policy, rounds: list[dict[str, float]]) -> dict[str, Any]:
    times = {name: [times[name] for times in rounds] for name in rounds[0]}
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
        # The other ways are measured for their travel.
        "of_floor_without_travel": median_ratio(times["floor"], without_travel) if case.way == "shm" else None,
        "stall_over_memcpy": median_ratio(times["copy"], times["memcpy"]),
        "all_seconds": times,
    }


def copy_rates(nbytes: int) -> dict[str, float]:
    """Bytes per second of one copy of `nbytes` (a read and a write count once), medians, one thread of the host.

    `pageable` is ordinary memory, as the handover's file is; `pinned` comes only from the driver.
    """
    on_device = [torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pageable = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    pairs = {
        "device to device": (on_device[0], on_device[1]),
        "device to pinned host": (on_device[0], pinned),
        "pinned host to device": (pinned, on_device[1]),
        "device to pageable host": (on_device[0], pageable[1]),
        "pageable host to device": (pageable[0], on_device[1]),
        "host to host": (pageable[0], pageable[1]),
    }
    return {name: nbytes / _median_copy_seconds(source, target) for name, (source, target) in pairs.items()}


def _median_copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    times = []
    # The first one warms up.
    for _ in range(1 + _COPY_REPEATS):
        torch.cuda.synchronize()
        started = time.monotonic()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    return statistics.median(times[1:])
