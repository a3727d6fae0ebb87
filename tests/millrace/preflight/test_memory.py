"""A model that a host can't hold is refused, with the sizes, before anything starts."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.training import LoraConfig, TeacherConfig, TrainingConfig
from millrace.errors import ModelFolderError
from millrace.preflight import memory
from millrace.preflight.memory import (
    check_generator_gpus,
    check_memory,
    check_teacher_memory,
    check_trainer_gpus,
    shared_versions,
)
from millrace.weights.slots import USUAL_SLOTS

GIB = 2**30
SHAPES = {
    "model.embed_tokens.weight": (1024, 1024, 256),
    **{f"model.layers.{layer}.mlp.up_proj.weight": (1024, 1024, 1024) for layer in range(2)},
    "lm_head.weight": (1024, 1024, 256),
}
"""2.5 GiB numbers: 30 GiB in a checkpoint, 5 GiB in 2 bytes each."""
FOLDER = Path("/models/large")


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 16 GiB of memory and as much shared memory; the file holds the former in bytes."""
    limit = tmp_path / "memory.max"
    limit.write_text(str(16 * GIB))
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", limit)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: SimpleNamespace(total=16 * GIB))
    return limit


def training(device: str = "cuda", **settings: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"max_steps": 1, "device": device, **settings})


def refusal(trainer: TrainingConfig | None, hosts: int = 1, versions: int = 0, dtype: str = "bfloat16") -> str:
    with pytest.raises(ModelFolderError) as caught:
        check_memory(FOLDER, SHAPES, trainer, hosts=hosts, versions=versions, dtype=dtype)
    assert caught.value.file == str(FOLDER) and caught.value.expected
    return caught.value.read


def test_pinned_copies_of_checkpoints_have_to_fit_into_memory() -> None:
    read = refusal(training())
    assert "30.0 GiB" in read and "16.0 GiB" in read


@pytest.mark.parametrize(
    ("trainer", "hosts"),
    [
        (training(), 2),
        (training(frozen_layers=1), 1),
        (training(lora=LoraConfig(rank=8).model_dump()), 1),
        (training("cpu"), 1),
        (None, 1),
    ],
    ids=["two hosts", "frozen layers", "adapters", "a CPU", "elsewhere"],
)
def test_smaller_copies_and_weights_alone_fit(trainer: TrainingConfig | None, hosts: int) -> None:
    check_memory(FOLDER, SHAPES, trainer, hosts=hosts)


@pytest.mark.parametrize("trainer", [None, training("cpu")])
def test_weights_on_a_cpu_take_two_bytes_a_number(trainer: TrainingConfig | None, host: Path) -> None:
    host.write_text(str(4 * GIB))
    assert "5.0 GiB" in refusal(trainer)


def test_only_a_trainer_divides_the_weights_among_hosts(host: Path) -> None:
    host.write_text(str(4 * GIB))
    check_memory(FOLDER, SHAPES, training("cpu"), hosts=2)
    assert "5.0 GiB" in refusal(None, hosts=2)


def test_versions_in_shared_memory_have_to_fit_there_and_count(host: Path) -> None:
    assert "30.0 GiB" in refusal(training("cpu"), versions=3, dtype="float32")
    assert "5.0 GiB" in refusal(training("cpu"), versions=3)
    assert "15.0 GiB" in refusal(training(), hosts=2, versions=3)
    assert "20.0 GiB" in refusal(None, versions=4)


@pytest.mark.parametrize(
    ("transport", "trains", "generators", "versions"),
    [
        ("shm", True, 4, 3),
        ("store", True, 0, 3),
        ("store", False, 4, 4),
        ("direct", False, 4, 8),
        # By the store: what five ends receive when NCCL fails.
        ("nccl", True, 4, 5),
        ("ipc", True, 1, 2),
    ],
)
def test_a_host_keeps_versions_for_its_trainer_and_each_of_its_generators(
    transport: str, trains: bool, generators: int, versions: int
) -> None:
    assert shared_versions(transport, trains=trains, generators=generators) == versions


def test_without_a_limit_the_machines_own_memory_counts(host: Path) -> None:
    host.write_text("max")
    check_memory(FOLDER, {"weight": (1024,)}, training(), versions=3)


def test_the_handover_has_as_many_copies_as_are_counted() -> None:
    assert memory.HANDOVER_COPIES == USUAL_SLOTS


def read_of(check: Callable[..., None], *arguments: object, **names: object) -> str | None:
    """What the check reads; None if the model fits."""
    try:
        check(FOLDER, *arguments, **names)
    except ModelFolderError as error:
        assert error.file == str(FOLDER) and error.expected
        return error.read
    return None


@pytest.mark.parametrize(
    ("settings", "dtype", "gib"),
    [
        ({}, "float32", 40),
        ({"optimizer_offload": True}, "float32", 20),
        ({"parallel": {"data": 2}}, "float32", 20),
        ({"parallel": {"data": 4, "shard": 2}}, "float32", 20),
        ({"parallel": {"tensor": 4}}, "float32", 10),
        ({"lora": {"rank": 8}}, "float32", 10),
        ({"lora": {"rank": 8}}, "bfloat16", 5),
    ],
)
def test_a_trainers_gpu_has_to_hold_its_share(
    settings: dict[str, object], dtype: str, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "read_shapes", lambda folder: SHAPES)
    assert read_of(check_trainer_gpus, training(**settings), dtype, gib * GIB) is None
    read = read_of(check_trainer_gpus, training(**settings), dtype, (gib - 1) * GIB)
    assert read is not None and f"{gib}.0 GiB" in read and f"{gib - 1}.0 GiB" in read


@pytest.mark.parametrize(
    ("num_gpus", "dtype", "quantized", "gib"),
    [(1, "bfloat16", False, 5), (5, "float32", False, 2), (1, "float32", True, 2.5)],
)
def test_a_generators_gpu_has_to_hold_its_share(
    num_gpus: int, dtype: str, quantized: bool, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "read_shapes", lambda folder: SHAPES)
    sizes = {"num_gpus": num_gpus, "quantized": quantized}
    assert read_of(check_generator_gpus, dtype, int(gib * GIB), **sizes) is None
    assert read_of(check_generator_gpus, dtype, int((gib - 0.1) * GIB), **sizes) is not None


@pytest.mark.parametrize(
    ("device", "replicas", "smallest", "fits"),
    [
        ("cpu", 3, None, True),
        ("cpu", 4, None, False),
        ("cuda", 4, 10, True),
        ("cuda", 1, 9, False),
        ("cuda", 1, None, True),
    ],
)
def test_a_teacher_has_to_fit_into_memory_with_each_replica_or_on_each_gpu(
    device: str, replicas: int, smallest: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "read_shapes", lambda folder: SHAPES)
    teacher = TeacherConfig.model_validate({"path": str(FOLDER), "device": device, "replicas": replicas})
    read = read_of(check_teacher_memory, teacher, "float32", smallest and smallest * GIB)
    assert (read is None) == fits
