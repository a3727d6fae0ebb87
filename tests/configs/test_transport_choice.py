"""`weights.transport: auto` and the transports that a config can't have."""

from typing import Any

import pytest

from configs.errors import ConfigError
from configs.load import PRESETS, load_config
from configs.operation import choose_transport
from configs.schema import RunConfig


def config(preset: str, **changes: Any) -> RunConfig:
    return load_config(PRESETS / f"{preset}.yaml", [f"{key}={value}" for key, value in changes.items()])


@pytest.mark.parametrize(
    ("preset", "changes", "transport"),
    [
        ("tiny-cpu", {}, "shm"),
        ("tiny-vllm-cpu", {}, "shm"),
        ("tiny-cpu", {"placement.generate.work_pool": "hosts"}, "store"),
        ("tiny-cpu", {"placement.generate.work_pool": "hosts", "placement.train.network": "10.0.0.0/8"}, "direct"),
        ("qwen3-8b-8gpu", {}, "nccl_m2n"),
        ("qwen3-8b-8gpu", {"training.lora.rank": 8}, "shm"),
        ("llama-70b-64gpu", {}, "nccl_m2n"),
        ("llama-70b-64gpu", {"training.lora.rank": 8}, "store"),
        ("qwen3-1.7b-1gpu", {}, "ipc"),
        ("qwen3-1.7b-1gpu", {"generation.replicas": 2, "training.parallel.data": 2}, "shm"),
    ],
)
def test_auto_follows_engine_devices_and_hosts(preset: str, changes: dict[str, Any], transport: str) -> None:
    made = config(preset, **changes)
    assert made.weights.transport == "auto"
    assert made.effective_weights.transport == choose_transport(made).transport == transport


def test_an_explicit_transport_is_kept() -> None:
    assert choose_transport(config("tiny-cpu", **{"weights.transport": "direct"})) == ("direct", "as configured")


@pytest.mark.parametrize(
    ("preset", "changes", "contradicted"),
    [
        ("tiny-cpu", {"weights.transport": "gloo"}, "generation.engine"),
        ("tiny-vllm-cpu", {"weights.transport": "nccl"}, "training.device"),
        ("qwen3-8b-8gpu", {"weights.transport": "gloo"}, "training.device"),
        ("qwen3-8b-8gpu", {"weights.transport": "ipc"}, "placement.colocated"),
        ("qwen3-1.7b-1gpu", {"weights.transport": "nccl"}, "placement.colocated"),
        (
            "qwen3-8b-8gpu",
            {"weights.transport": "nccl", "generation.engine_args.data_parallel_size": 2},
            "data_parallel",
        ),
    ],
)
def test_a_transport_that_engine_or_devices_do_not_allow_is_refused(
    preset: str, changes: dict[str, Any], contradicted: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config(preset, **changes)
    (mistake,) = refused.value.mistakes
    assert mistake.key == "weights.transport"
    assert contradicted in mistake.read
