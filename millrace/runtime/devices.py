"""Which of a host's GPUs each of its stage processes gets.

    all GPUs of the host, or placement.<stage>.devices ─► one process after the other ─► CUDA_VISIBLE_DEVICES of each

    GPUs of the host      0 1 2 3   4 5          6 7
    processes             train-0   generate-0   generate-1      4 ranks, twice tensor_parallel_size 2

Tensor ranks exchange most, so they get neighbours, beginning at a multiple of their number: that keeps them within a
pair or an island of NVLink. Processes come in the order of the largest power of two that divides their number of GPUs,
which leaves no gaps.
"""

import math
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import NamedTuple

from configs.schema import RunConfig
from millrace.errors import DevicesInUse, InputError

Process = tuple[str, int]
"""Stage and replica; for the trainer, the number of its host."""
Assignment = Mapping[Process, tuple[str, ...]]
"""Names of the GPUs of each process that has some, in the order of its ranks."""

_STAGES = ("train", "generate", "score", "teach", "evaluate")
"""Stages that may use GPUs, in the order in which they get them."""
_TURNS = {"train": "generate", "generate": "train"}
"""Stages that take turns on the same GPUs with `placement.colocated`."""
_SIZES = (
    "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size",
)  # fmt: skip
"""Arguments of vLLM whose product is the number of GPUs of an engine."""


class _Need(NamedTuple):
    process: Process
    num_devices: int
    group: int
    """Number of GPUs that must be neighbours: its tensor ranks."""


def host_devices() -> tuple[str, ...] | None:
    """Names of this process's GPUs, as CUDA_VISIBLE_DEVICES has them or by index. None if torch is built for CPUs.

    Counting does not start CUDA, except for names of MIG instances, which torch can't count otherwise.
    """
    if version("torch").endswith("+cpu"):
        return None
    # Imported late: it takes seconds.
    import torch

    if torch.version.cuda is None:
        return None
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(map(str, range(count)))
    names = tuple(name.strip() for name in visible.split(","))
    # A process sees one MIG instance, however many are named.
    return names if count and names[0].startswith("MIG-") else names[:count]


def generator_devices(config: RunConfig) -> int:
    """Number of GPUs of one generator that generates on GPUs. Raises InputError for a size that is not a number."""
    sizes = {name: config.generation.engine_args.get(name, 1) for name in _SIZES}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            expected = "a whole number of at least 1"
            raise InputError(repr(size), key=f"generation.engine_args.{name}", expected=expected)
    return math.prod(sizes.values())


def may_use_devices(config: RunConfig, processes: Iterable[Process]) -> bool:
    """Whether one of these processes uses GPUs where there are some."""
    return bool(_needs(config, processes, ()))


def assign(
    config: RunConfig,
    processes: Iterable[Process],
    devices: Sequence[str] | None,
    used: Mapping[str, str] | None = None,
) -> Assignment:
    """Divides the `devices` of a host among these of its processes, so that no two have the same.

    Only co-located trainer and generators share their GPUs, and so do the first scorer and the evaluation. The result
    depends on the arguments only. `used`: GPUs that others hold, with their holders. Raises InputError if the GPUs
    are too few or not those of `placement.<stage>.devices`, and DevicesInUse if they would be enough without others.
    """
    needs, host = _needs(config, processes, devices), tuple(devices or ())
    named = {need.process[0]: _named_devices(config, need.process[0], host) for need in needs}
    if (assignment := _assign(config, needs, host, named, used or {})) is not None:
        return assignment
    places = f"host {socket.gethostname()} has {len(host) or 'none'}"
    places += "".join(f", placement.{stage}.devices is {_list(names)}" for stage, names in named.items() if names)
    expected = "GPUs for all, neighbours for tensor ranks; or some of the stages on other hosts"
    if used and _assign(config, needs, host, named, {}) is not None:
        holders = ", ".join(f"{device} by {holder}" for device, holder in used.items())
        raise DevicesInUse(f"{_sum(config, needs)}; {places}, in use: {holders}", expected=expected)
    raise InputError(f"{_sum(config, needs)}; {places}", expected=expected)


def gpus(devices: Sequence[str]) -> str:
    """Names GPUs for people, such as `GPUs 0, 1`."""
    return f"GPU{'s' * (len(devices) > 1)} {', '.join(devices)}"


def _needs(config: RunConfig, processes: Iterable[Process], devices: Sequence[str] | None) -> list[_Need]:
    """The processes that use GPUs, in the order in which they get them."""
    needs = []
    for stage, replica in processes:
        count = group = 0
        if stage == "train" and config.training.device == "cuda":
            group = config.training.parallel.tensor
            count = config.training.parallel.data // config.placement.train.hosts * group
        elif stage == "generate" and config.generation.engine == "vllm" and devices is not None:
            count, group = generator_devices(config), config.generation.engine_args.get(_SIZES[0], 1)
        elif stage in ("score", "evaluate") and config.scoring.device == "cuda" and config.loads_scoring_model:
            count = group = 1
        elif stage == "teach":
            count = group = int(config.teacher_of(replica)[1].device == "cuda")
        if count:
            needs.append(_Need((stage, replica), count, group))

    def order(need: _Need) -> tuple[int, int, Process]:
        return -(need.num_devices & -need.num_devices), _STAGES.index(need.process[0]), need.process

    return sorted(needs, key=order)


def _named_devices(config: RunConfig, stage: str, host: Sequence[str]) -> Sequence[str] | None:
    """The GPUs that `placement` names for the stage, or for the one that it takes turns with; None: any.

    Raises InputError for one that the host does not have.
    """
    for name in (stage, _TURNS[stage]) if config.placement.colocated and stage in _TURNS else (stage,):
        if (devices := getattr(config.placement, name).devices) is not None:
            names = tuple(map(str, devices))
            if unknown := [device for device in names if device not in host]:
                read = f"{_list(names)}, and host {socket.gethostname()} has no GPU {unknown[0]}"
                expected = f"some of {_list(host)}" if host else "null, because it has none"
                raise InputError(read, key=f"placement.{name}.devices", expected=expected)
            return names
    return None


def _assign(
    config: RunConfig,
    needs: Sequence[_Need],
    host: Sequence[str],
    named: Mapping[str, Sequence[str] | None],
    used: Mapping[str, str],
) -> Assignment | None:
    """Divides the GPUs as `assign` does. None if there are too few."""
    claimed = {device for names in named.values() for device in names or ()}
    assignment: dict[Process, tuple[str, ...]] = {}
    for need in needs:
        stage, names = need.process[0], named[need.process[0]]
        if stage == "evaluate" and names is None and ("score", 0) in assignment:
            assignment[need.process] = assignment["score", 0]
            continue
        shares = _TURNS.get(stage) if config.placement.colocated else None
        taken = {device for (other, _), devices in assignment.items() if other != shares for device in devices}
        taken |= {*used} if names is not None else {*used, *claimed}
        choice = host if names is None else names
        positions = _neighbours(need, [device not in taken for device in choice])
        if positions is None:
            return None
        assignment[need.process] = tuple(choice[position] for position in positions)
    return assignment


def _neighbours(need: _Need, free: list[bool]) -> list[int] | None:
    """Positions of the first groups of free neighbours; None if there are too few."""
    positions: list[int] = []
    # A group of 6, say, begins at a multiple of 2, the largest power of two that divides it.
    starts = range(0, len(free) - need.group + 1, need.group & -need.group)
    for _ in range(need.num_devices // need.group):
        start = next((start for start in starts if all(free[start : start + need.group])), None)
        if start is None:
            return None
        free[start : start + need.group] = [False] * need.group
        positions += range(start, start + need.group)
    return positions


def _sum(config: RunConfig, needs: Sequence[_Need]) -> str:
    """The number of GPUs that all need, and where it comes from."""
    totals = {stage: sum(need.num_devices for need in needs if need.process[0] == stage) for stage in _STAGES}
    if totals["score"] and config.placement.evaluate.devices is None:
        totals["evaluate"] = 0
    sizes = config.generation.engine_args
    factors = "".join(f" × {name} {sizes.get(name, 1)}" for name in _SIZES if name in sizes or name == _SIZES[0])
    generators = sum(need.process[0] == "generate" for need in needs)
    # A host may have one of a work pool's generators.
    counted = "generation.replicas" if generators == config.generation.replicas else "generators here:"
    terms = {
        "train": _count(totals["train"], "trainer rank"),
        "generate": f"{counted} {generators}{factors}",
        "score": _count(totals["score"], "reward model"),
        "teach": _count(totals["teach"], "teacher"),
        "evaluate": _count(totals["evaluate"], "reward model") + " of the evaluation",
    }
    shown = [terms[stage] for stage in ("generate", "train", "score", "teach", "evaluate") if totals[stage]]
    total = sum(totals.values())
    if config.placement.colocated and totals["generate"] and totals["train"]:
        total -= min(totals["generate"], totals["train"])
        shown[:2] = [f"the larger of {shown[0]} and {shown[1]}"]
    return f"{' + '.join(shown)} = {_count(total, 'GPU')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _list(devices: Sequence[str]) -> str:
    return ", ".join(devices)
