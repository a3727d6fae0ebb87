"""Checks that this host and its GPUs hold what its stages keep of a model there, before anything starts.

    a stage on the CPU      2 bytes per number, the least that any process holds
    trainer on GPUs         its pinned copy of a checkpoint: a float32 weight and two moments per trained number
    shared memory           versions: those that a trainer hands over, and those that generators receive
    a trainer's GPU         its share of weights, gradients and moments
    a generator's GPU       its share of the weights
    a teacher               its weights: in main memory once for each replica, or on the GPU of each

A least need, which a host that fails can't meet: activations and caches come on top. Does not import torch.
"""

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from configs.operation import SHARDED
from configs.training import TeacherConfig, TrainingConfig
from millrace.models.weight_files import require
from millrace.preflight.model_folder import read_shapes
from storage.stores.memory import memory_folder

HANDOVER_COPIES = 3
"""`millrace.weights.slots.USUAL_SLOTS`; that module imports torch."""
_RECEIVED_COPIES = {"shm": 0, "direct": 2}
"""Versions that a generator receives in shared memory; by the store, to which live transports fall back, one."""
_CHECKPOINT_BYTES = 3 * 4
_BYTES = {"float32": 4, "bfloat16": 2}
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_memory(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    training: TrainingConfig | None,
    *,
    hosts: int = 1,
    versions: int = 0,
    dtype: str = "float32",
) -> None:
    """Raises ModelFolderError if this host can't hold the model in `folder`, whose tensors have these shapes.

    `training`: the settings of the trainer, whose model `hosts` divide; None if it runs elsewhere. `versions`: whole
    ones in shared memory, of this `dtype`.
    """
    numbers = sum(map(math.prod, shapes.values()))
    needs = {"weights": 2 * numbers // (hosts if training is not None else 1)}
    if training is not None and training.device == "cuda":
        needs = {"pinned copies of checkpoints": _CHECKPOINT_BYTES * _trained_numbers(shapes, training) // hosts}
    if versions:
        shared, place = versions * numbers * _BYTES[dtype], memory_folder()
        size = shutil.disk_usage(place).total
        read = f"{versions} versions of its weights take {_gib(shared)} and {place.parent} has {_gib(size)}"
        require(shared <= size, read, "more shared memory: docker run --shm-size, or a smaller model", file=folder)
        needs["versions in shared memory"] = shared
    memory, needed = _memory(), sum(needs.values())
    parts = " and ".join(f"at least {_gib(size)} of {what}" for what, size in needs.items() if size)
    read = f"it takes {parts}, and this machine has {_gib(memory)}"
    expected = "a larger machine, a smaller model, or fewer trained weights (training.lora.rank, frozen_layers)"
    require(needed <= memory, read, expected, file=folder)


def shared_versions(transport: str, *, trains: bool, generators: int) -> int:
    """How many versions a host with a trainer, and with this many generators, keeps in shared memory at once."""
    # Where shards are sent, sync_weights receives a version itself before it stores it for late generators.
    sent = (1 if transport in SHARDED else HANDOVER_COPIES) if trains else 0
    return sent + generators * _RECEIVED_COPIES.get(transport, 1)


def check_trainer_gpus(folder: Path, training: TrainingConfig, dtype: str, smallest: int) -> None:
    """Raises ModelFolderError if a trainer's GPU can't hold its share of the model in `folder`.

    `dtype`: number format of weights that are not trained; `smallest`: memory of this host's smallest GPU, bytes.
    """
    shapes, ranks = read_shapes(folder), training.parallel
    numbers, trained = sum(map(math.prod, shapes.values())), _trained_numbers(shapes, training)
    per_number = 4 + 4 + (0 if training.optimizer_offload else 8)
    share = per_number * trained + _BYTES[dtype] * (numbers - trained)
    share //= (ranks.shard or ranks.data) * ranks.tensor
    read = f"a trainer's GPU keeps at least {_gib(share)} of it, and the smallest here has {_gib(smallest)}"
    expected = "more ranks (training.parallel), training.optimizer_offload, training.lora.rank, or larger GPUs"
    require(share <= smallest, read, expected, file=folder)


def check_generator_gpus(folder: Path, dtype: str, smallest: int, *, num_gpus: int, quantized: bool) -> None:
    """Raises ModelFolderError if a GPU of an engine with `num_gpus` can't hold its share of the model in `folder`."""
    numbers = sum(map(math.prod, read_shapes(folder).values()))
    share = numbers * (1 if quantized else _BYTES[dtype]) // num_gpus
    read = f"a generator's GPU keeps at least {_gib(share)} of it, and the smallest here has {_gib(smallest)}"
    expected = "more GPUs per engine (generation.engine_args.tensor_parallel_size), quantization, or larger GPUs"
    require(share <= smallest, read, expected, file=folder)


def check_teacher_memory(folder: Path, teacher: TeacherConfig, dtype: str, smallest: int | None) -> None:
    """Raises ModelFolderError if this host, or one of its GPUs, can't hold the teacher in `folder`.

    `smallest`: memory of this host's smallest GPU, bytes; None if that is not known.
    """
    numbers, size = sum(map(math.prod, read_shapes(folder).values())), smallest
    needed, place, expected = numbers * _BYTES[dtype], "on a GPU", "a smaller teacher, or larger GPUs"
    if teacher.device == "cpu":
        needed, size, place = 2 * numbers * teacher.replicas, _memory(), f"{teacher.replicas} times in main memory"
        expected = "a larger machine, a smaller teacher, or fewer replicas"
    if size is not None:
        read = f"as a teacher, {place}, it takes at least {_gib(needed)} of {_gib(size)}"
        require(needed <= size, read, expected, file=folder)


def _trained_numbers(shapes: Mapping[str, Sequence[int]], training: TrainingConfig) -> int:
    """The numbers that checkpoints hold; adapters, which are small, count as none."""
    if training.lora.rank is not None:
        return 0
    return sum(math.prod(shape) for name, shape in shapes.items() if _is_trained(name, training.frozen_layers))


def _is_trained(name: str, frozen_layers: int) -> bool:
    if not frozen_layers:
        return True
    layer = _LAYER.match(name)
    return "embed_tokens" not in name if layer is None else int(layer[1]) >= frozen_layers


def _memory() -> int:
    """Bytes of memory of this machine, or of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Without a limit the file holds `max`.
    with suppress(OSError, ValueError):
        return min(memory, int(_CGROUP_LIMIT.read_text()))
    return memory


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
