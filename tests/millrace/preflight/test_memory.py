"""A model that a host can't hold is refused, with the sizes, before anything starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.load import PRESETS, load_config
from configs.training import LoraConfig, TrainingConfig
from millrace.errors import ModelFolderError
from millrace.preflight import memory
from millrace.preflight.memory import check_gpu_memory, check_memory
from millrace.weights.slots import USUAL_SLOTS

GIB = 2**30
SHAPES = {
    "model.embed_tokens.weight": (1024, 1024, 256),
    **{f"model.layers.{layer}.mlp.up_proj.weight": (1024, 1024, 1024) for layer in range(2)},
    "lm_head.weight": (1024, 1024, 256),
}
"""2.5 GiB numbers: 30 GiB in a checkpoint, 5 GiB in 2 bytes each."""
FOLDER = Path("/models/large")
PRESET = PRESETS / "qwen3-8b-8gpu.yaml"


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


def refusal(trainer: TrainingConfig | None, hosts: int = 1, handover_dtype: str | None = None) -> str:
    with pytest.raises(ModelFolderError) as caught:
        check_memory(FOLDER, SHAPES, trainer, hosts=hosts, handover_dtype=handover_dtype)
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
    assert "30.0 GiB" in refusal(training("cpu"), handover_dtype="float32")
    assert "5.0 GiB" in refusal(training("cpu"), handover_dtype="bfloat16")
    assert "15.0 GiB" in refusal(training(), hosts=2, handover_dtype="bfloat16")


def test_without_a_limit_the_machines_own_memory_counts(host: Path) -> None:
    host.write_text("max")
    check_memory(FOLDER, {"weight": (1024,)}, training(), handover_dtype="float32")


def test_the_handover_has_as_many_copies_as_are_counted() -> None:
    assert memory.HANDOVER_COPIES == USUAL_SLOTS


def gpu_refusal(monkeypatch: pytest.MonkeyPatch, gib: int, *settings: str) -> str | None:
    """What is read where a GPU has this much memory; None if the model fits."""
    monkeypatch.setattr(memory, "read_shapes", lambda folder: SHAPES)
    try:
        config = load_config(PRESET, ["training.parallel.data=1", *settings])
        check_gpu_memory(FOLDER, config, {"train", "generate"}, gib * GIB)
    except ModelFolderError as error:
        assert error.file == str(FOLDER) and error.expected
        return error.read
    return None


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        ([], 40),
        (["training.optimizer_offload=true"], 20),
        (["training.parallel.data=2"], 20),
        (["training.parallel.data=4", "training.parallel.shard=2"], 20),
        (["training.parallel.tensor=4"], 10),
        (["training.lora.rank=8", "model.dtype=bfloat16"], 5),
    ],
)
def test_a_gpu_holds_its_share_of_what_is_trained(
    settings: list[str], gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_refusal(monkeypatch, gib, *settings) is None
    read = gpu_refusal(monkeypatch, gib - 1, *settings)
    assert read is not None and f"{gib}.0 GiB" in read and f"{gib - 1}.0 GiB" in read


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        ([], 5),
        (["generation.engine_args.tensor_parallel_size=5"], 1),
        (["generation.dtype=float32", "generation.engine_args.quantization=fp8"], 3),
    ],
)
def test_a_gpu_holds_its_share_of_an_engines_weights(
    settings: list[str], gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ["training.parallel.data=64", "training.groups_per_step=64"]
    assert gpu_refusal(monkeypatch, gib, *trainer, *settings) is None
    assert gpu_refusal(monkeypatch, 0, *trainer, *settings) is not None
