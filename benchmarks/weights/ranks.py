"""Pushes from a trainer of several ranks: its shards gathered, or sent as they are.

    shm, store   ranks ─gather─► rank 0: all tensors ─► shared memory ─► sync_weights ─► generator
    direct       ranks ─copy─► snapshot ══shards══════════════════════════════════════► generator

Each rank is a process, as are sync_weights and the generator. "live" is from the handover until the generator's own
parameters have the version; "stall" is how long the slowest rank is held up by it. Medians over the pushes.
"""

import multiprocessing
import resource
import shutil
import statistics
import time
import uuid
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.weights.policy import Shapes
from benchmarks.weights.processes import DEADLINE_SECONDS, Setup, next_report, started
from millrace.weights.base import Manifest, Weights, WeightsId, WeightsSender
from millrace.weights.direct.layout import ShardLayout, TensorSpec
from millrace.weights.direct.sender import ShardSender
from millrace.weights.shm import ShmSender

WAYS = ("shm", "store", "direct")
_WARM_UP = 2


def measure_ranks(shapes: Shapes, sizes: list[int], memory: Path, disk: Path, num_pushes: int) -> list[dict[str, Any]]:
    """For each number of ranks and each way: seconds, bytes, and the most memory that a trainer's rank added."""
    return [
        _measure(shapes, size, way, memory=memory, disk=disk, num_pushes=num_pushes) for size in sizes for way in WAYS
    ]


def _measure(shapes: Shapes, size: int, way: str, *, memory: Path, disk: Path, num_pushes: int) -> dict[str, Any]:
    run = f"benchmark-{uuid.uuid4().hex}"
    setup = Setup(transport=way, folder=memory / run, store=str(disk / run), device="cpu")
    setup.folder.mkdir()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        with started(setup) as (sync_weights, generator):
            for rank in range(size):
                pipe, rank_pipe = context.Pipe()
                process = context.Process(target=_rank, args=(setup, shapes, rank, size, rank_pipe), daemon=True)
                process.start()
                rank_pipe.close()
                pipes.append(pipe)
                processes.append(process)
            for pipe in pipes:
                next_report(pipe)
            rounds = []
            for version in range(1, 1 + _WARM_UP + num_pushes):
                called = time.monotonic()
                for pipe in pipes:
                    pipe.send(version)
                reports = [next_report(pipe) for pipe in pipes]
                next_report(sync_weights)
                loaded = next_report(generator)
                rounds.append((loaded["live"] - called, max(report["stall"] for report in reports)))
            for pipe in pipes:
                pipe.send(None)
            final_reports = [next_report(pipe) for pipe in pipes]
            # Before sync_weights, which they would miss aloud.
            _kill(processes)
    finally:
        _kill(processes)
        shutil.rmtree(setup.folder)
        shutil.rmtree(setup.store, ignore_errors=True)
    lives, stalls = zip(*rounds[_WARM_UP:], strict=True)
    return {
        "ranks": size,
        "way": way,
        "bytes": sum(torch.Size(shape).numel() for shape in shapes.values()) * torch.float32.itemsize,
        "live": statistics.median(lives),
        "stall": statistics.median(stalls),
        "wire_bytes": sum(report["wire_bytes"] for report in final_reports) / len(rounds),
        "peak_bytes": max(report["peak_bytes"] for report in final_reports),
        "all_seconds": {"live": lives, "stall": stalls},
    }


def _kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _rank(setup: Setup, shapes: Shapes, rank: int, size: int, pipe: Connection) -> None:
    """Runs a rank of the trainer: pushes each version that `pipe` names, and reports how long it was stalled."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{setup.folder}/group", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    layout = ShardLayout(tuple(TensorSpec(name, "float32", shape) for name, shape in shapes.items()), data=size)
    parameters = {
        name: DTensor.from_local(
            _shard(layout, rank, name), mesh, [Shard(0)], shape=torch.Size(shape), stride=_stride(shape)
        )
        for name, shape in shapes.items()
    }
    initial_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with closing(_sender(setup, layout, rank)) as sender:
        pipe.send({})
        while (version := pipe.recv()) is not None:
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.to_local().add_(1)
            dist.barrier()
            began = time.monotonic()
            # The same on every rank, as when rank 0 hands it to all.
            manifest = Manifest(id=WeightsId(incarnation=0, policy_version=version, t_offered=float(version)))
            if isinstance(sender, ShardSender):
                tensors = {name: parameter.to_local() for name, parameter in parameters.items()}
            else:
                # Rank 0 has all of them at once, as a trainer that hands them over whole; the others take part.
                tensors = {}
                for name, parameter in parameters.items():
                    whole = parameter.full_tensor()
                    if rank == 0:
                        tensors[name] = whole
                    del whole
            if rank == 0 or isinstance(sender, ShardSender):
                sender.publish(Weights(manifest=manifest, tensors=tensors))
            pipe.send({"stall": time.monotonic() - began})
            del tensors
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - initial_kib
        wire_bytes = sender.wire_bytes if isinstance(sender, ShardSender) else 0
        pipe.send({"peak_bytes": peak << 10, "wire_bytes": wire_bytes})
        # The parent ends this process.
        pipe.recv()


def _shard(layout: ShardLayout, rank: int, name: str) -> torch.Tensor:
    box = layout.boxes(rank)[name]
    return torch.randn([end - begin for begin, end in box])


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _sender(setup: Setup, layout: ShardLayout, rank: int) -> WeightsSender:
    if setup.transport == "direct":
        cpu = torch.device("cpu")
        return ShardSender(setup.address.read_text, layout, rank, device=cpu, deadline_seconds=DEADLINE_SECONDS)
    like = {spec.name: torch.empty(spec.shape, device="meta") for spec in layout.tensors}
    # Only rank 0 hands over; the others never use theirs.
    path = setup.handover if rank == 0 else setup.handover.with_name(f"unused-{rank}")
    return ShmSender(path, like if rank == 0 else {}, num_generators=1)
