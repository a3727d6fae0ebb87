"""A config on GPUs becomes what a campaign costs, and whether it fits."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from configs.recipe import choose_recipe
from configs.schema import RunConfig
from millrace.errors import InputError, ModelFolderError
from millrace.planning.durations import Costs
from millrace.planning.gpus import GpuMachine, num_gpus
from millrace.planning.hardware import hardware_named
from millrace.planning.models import model_named, shape_of_config, shape_of_model


def machine(model: str = "llama-8b") -> GpuMachine:
    return GpuMachine(shape=model_named(model), hardware=hardware_named("h100"))


def config(**changes: object) -> RunConfig:
    """8B on 8 GPUs, and four generators of two; `section__key` is changed."""
    values: dict[str, dict[str, object]] = {
        "model": {"dtype": "float32"},
        "generation": {
            "engine": "vllm",
            "dtype": "bfloat16",
            "engine_args": {"tensor_parallel_size": 2},
            "replicas": 4,
            "group_size": 16,
            "groups_per_batch": 8,
            "max_new_tokens": 4096,
        },
        "training": {
            "max_steps": 100,
            "groups_per_step": 32,
            "device": "cuda",
            "compute_dtype": "bfloat16",
            "parallel": {"data": 8},
            "activation_checkpointing": True,
        },
        "weights": {"transport": "direct"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return RunConfig.model_validate(values)


SYNC = {"pipeline__mode": "sync", "generation__groups_per_batch": 4}


def test_a_config_takes_the_gpus_of_trainer_and_generators() -> None:
    assert num_gpus(config()) == 8 + 4 * 2
    assert num_gpus(config(placement__colocated=True, **SYNC)) == 8
    assert num_gpus(config(training__parallel={"data": 4, "tensor": 2})) == 8 + 4 * 2


def test_every_cost_of_a_campaign_is_a_duration() -> None:
    costs = machine().costs(config())
    nbytes = 2 * model_named("llama-8b").parameters
    assert 0.005 < costs.decode(128, 128 * 700) < 0.02
    assert 0.1 < costs.prefill(8192) < 0.3
    # 512 rollouts of 1,200 tokens: 7.5 FLOPs per parameter and token at 0.36 of eight GPUs, and a little more.
    products = 7.5 * 7.5e9 * 512 * 1200 / (8 * 989e12 * 0.36)
    assert products < costs.train(512 * 1200, 512) < 1.1 * products
    assert 0 < costs.handover < 0.5
    assert nbytes / 1e9 < costs.push < 2 * nbytes / 1e9
    assert 0 < costs.pause < 1
    assert 0 < costs.checkpoint < 2
    assert min(costs.score, costs.overhead) > 0
    assert costs.cores is None


@pytest.mark.parametrize(
    ("name", "changes", "sign"),
    [
        ("decode", {"generation__engine_args": {"tensor_parallel_size": 4}}, -1),
        ("decode", {"generation__engine_args": {"tensor_parallel_size": 2, "quantization": "fp8"}}, -1),
        ("decode", {"generation__engine_args": {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}}, -1),
        ("train", {"training__parallel": {"data": 16}}, -1),
        ("train", {"training__activation_checkpointing": False}, -1),
        ("train", {"training__minibatches": 4}, 1),
        ("train", {"training__kl": {"coefficient": 0.1}}, 1),
        ("train", {"training__lora": {"rank": 8}}, -1),
        ("train", {"training__frozen_layers": 16}, -1),
        ("train", {"training__compute_dtype": "float32"}, 1),
        ("score", {"scoring__workers": 4}, -1),
        ("push", {"weights__transport": "shm"}, -1),
        ("push", {"weights__transport": "store"}, 1),
        ("handover", {"weights__transport": "shm"}, 1),
        ("push", {"weights__transport": "nccl"}, -1),
        ("handover", {"weights__transport": "nccl"}, -1),
        ("checkpoint", {"training__frozen_layers": 16}, -1),
        ("checkpoint", {"model__dtype": "bfloat16"}, 0),
    ],
)
def test_a_setting_changes_the_cost_it_should(name: str, changes: dict[str, object], sign: int) -> None:
    def cost(costs: Costs) -> float:
        value = getattr(costs, name)
        arguments = {"decode": (128, 90_000), "train": (600_000, 512)}
        return float(value(*arguments[name]) if name in arguments else value)

    before, after = cost(machine().costs(config())), cost(machine().costs(config(**changes)))
    assert (after > before) - (after < before) == sign


def test_colocated_stages_move_their_memory_to_the_cpu_and_back() -> None:
    apart = machine().costs(config(**SYNC))
    together = machine().costs(config(placement__colocated=True, **SYNC))
    parameters = model_named("llama-8b").parameters
    # Weights and moments in float32, both ways, over eight GPUs at half of 64 GB/s.
    assert together.overhead - apart.overhead == pytest.approx(2 * 12 * parameters / 8 / 32e9)
    assert together.pause - apart.pause == pytest.approx(2 * 2 * parameters / 2 / 32e9)


def test_what_does_not_fit_is_reported_for_both_stages() -> None:
    report = machine().memory(config())
    assert report.fits
    assert report.sentence is None
    alone = config(training__parallel={"data": 1}, generation__engine_args={"tensor_parallel_size": 1})
    large = machine("llama-70b").memory(alone)
    assert not large.fits
    assert not large.trainer_fits
    assert large.trainer > 1000 * 2**30
    assert "GiB too much; a generator needs" in (large.sentence or "")


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama-8b", {"generation__engine_args": {"pipeline_parallel_size": 2}}),
        ("llama-8b", {"generation__engine_args": {"quantization": "awq"}}),
        ("llama-8b", {"training__parallel": {"tensor": 3}}),
        ("llama-8b", {"generation__engine_args": {"tensor_parallel_size": 3}}),
        ("qwen3-30b-a3b", {"training__parallel": {"data": 4, "tensor": 2}}),
    ],
)
def test_a_layout_whose_costs_are_not_known_is_refused(model: str, changes: dict[str, object]) -> None:
    with pytest.raises(InputError):
        machine(model).costs(config(**changes))


@pytest.mark.parametrize(
    "sizes",
    [
        LlamaConfig(num_key_value_heads=8, vocab_size=32_000),
        Qwen2Config(num_hidden_layers=4, tie_word_embeddings=True),
        Qwen3MoeConfig(num_hidden_layers=2, head_dim=64),
    ],
)
def test_a_model_has_the_parameters_of_its_config(sizes: LlamaConfig) -> None:
    import torch

    with torch.device("meta"):
        expected = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(sizes).parameters())
    assert shape_of_config(sizes.to_dict(), "a folder").parameters == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("llama-8b", 8.03, 7.5), ("qwen2.5-1.5b", 1.54, 1.54), ("qwen3-30b-a3b", 30.5, 3.04)],
)
def test_published_models_have_their_published_sizes(name: str, billions: float, active: float) -> None:
    shape = model_named(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.02)
    computing = shape.layers * shape.active_layer_parameters + shape.output_parameters
    assert computing / 1e9 == pytest.approx(active, abs=0.02)


def test_sizes_are_those_of_the_folder_or_of_the_bootstrap_model(tmp_path: Path) -> None:
    assert shape_of_model(config()).hidden == choose_recipe(config()).hidden_size
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100}))
    shape = shape_of_model(config(model__path=str(tmp_path)))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.tied) == (2, 4, 16, False)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    for folder in (tmp_path, tmp_path / "elsewhere"):
        with pytest.raises(ModelFolderError):
            shape_of_model(config(model__path=str(folder)))
