"""A config on hardware becomes what a campaign costs, and whether it fits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from millrace.planning.costs.campaign import (
    campaign_costs,
    check_memory,
    generator_gpus,
    num_gpus,
    roofline,
    shape_of_model,
    trainer_setup,
)
from millrace.planning.costs.hardware import hardware_named
from millrace.planning.costs.known_models import model_named
from millrace.planning.simulation.lengths import LogNormalLengths

from configs.schema import RunConfig
from millrace.errors import InputError, ModelFolderError

H100 = hardware_named("h100")
LLAMA = model_named("llama-8b")
LENGTHS = LogNormalLengths(prompt_tokens=200, mean_tokens=1000, sigma=0.5, max_tokens=4096, group_size=16)


def config(**changes: object) -> RunConfig:
    """8B on 8 GPUs, beside four generators of two; `section__key` is changed."""
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


def test_a_config_takes_the_gpus_of_trainer_and_generators() -> None:
    assert num_gpus(config()) == 8 + 4 * 2
    shared = config(placement__colocated=True, pipeline__mode="sync", generation__groups_per_batch=4)
    assert num_gpus(shared) == 8


def test_every_cost_of_a_campaign_is_a_duration() -> None:
    costs = campaign_costs(config(), LLAMA, H100)
    assert 0.005 < costs.decode(128, 128 * 700) < 0.02
    assert 0.1 < costs.prefill(8192) < 0.3
    # 512 rollouts of 1,200 tokens: 7.5 FLOPs per parameter and token at 0.36 of eight GPUs, and a little more.
    products = 7.5 * 7.5e9 * 512 * 1200 / (8 * 989e12 * 0.36)
    assert products < costs.train(512 * 1200, 512) < 1.1 * products
    assert 0 < costs.handover < 0.5
    assert LLAMA.parameters * 2 / 1e9 < costs.push < 2 * LLAMA.parameters * 2 / 1e9
    assert 0 < costs.pause < 1
    assert 0 < costs.checkpoint < 2
    assert costs.score > 0
    assert costs.overhead > 0
    assert costs.cores is None


@pytest.mark.parametrize(
    ("name", "changes", "less", "more"),
    [
        ("decode", {"generation__engine_args": {"tensor_parallel_size": 4}}, True, False),
        ("decode", {"generation__engine_args": {"tensor_parallel_size": 2, "quantization": "fp8"}}, True, False),
        ("decode", {"generation__engine_args": {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}}, True, False),
        ("train", {"training__parallel": {"data": 16}}, True, False),
        ("train", {"training__activation_checkpointing": False}, True, False),
        ("train", {"training__minibatches": 4}, False, True),
        ("train", {"training__kl": {"coefficient": 0.1}}, False, True),
        ("train", {"training__lora": {"rank": 8}}, True, False),
        ("train", {"training__frozen_layers": 16}, True, False),
        ("train", {"training__compute_dtype": "float32"}, False, True),
        ("score", {"scoring__workers": 4}, True, False),
        ("push", {"weights__transport": "shm"}, True, False),
        ("push", {"weights__transport": "store"}, False, True),
        ("handover", {"weights__transport": "shm"}, False, True),
        ("checkpoint", {"training__frozen_layers": 16}, True, False),
        ("checkpoint", {"model__dtype": "bfloat16"}, False, False),
    ],
)
def test_a_setting_changes_the_cost_it_should(name: str, changes: dict[str, object], less: bool, more: bool) -> None:
    def cost(one: RunConfig) -> float:
        found = getattr(campaign_costs(one, LLAMA, H100), name)
        arguments = {"decode": (128, 90_000), "train": (600_000, 512)}
        return float(found(*arguments[name]) if name in arguments else found)

    before, after = cost(config()), cost(config(**changes))
    assert (after < before, after > before) == (less, more)


def test_colocated_stages_move_their_memory_to_the_cpu_and_back_every_step() -> None:
    apart = campaign_costs(config(pipeline__mode="sync", generation__groups_per_batch=4), LLAMA, H100)
    together = campaign_costs(
        config(placement__colocated=True, pipeline__mode="sync", generation__groups_per_batch=4), LLAMA, H100
    )
    # Weights and moments in float32, both ways, over eight GPUs at 32 GB/s.
    assert together.overhead - apart.overhead == pytest.approx(2 * 12 * LLAMA.parameters / 8 / 32e9)
    assert together.pause - apart.pause == pytest.approx(2 * 2 * LLAMA.parameters / 2 / 32e9)


def test_a_config_that_fits_says_nothing() -> None:
    report = check_memory(config(), LLAMA, H100, LENGTHS)
    assert report.fits
    assert report.sentence is None
    assert report.places == 8 * 16


def test_what_does_not_fit_is_one_sentence_with_both_numbers() -> None:
    large = config(training__parallel={"data": 1}, generation__engine_args={"tensor_parallel_size": 1})
    report = check_memory(large, model_named("llama-70b"), H100, LENGTHS)
    assert not report.fits
    assert report.sentence == (
        "the trainer needs 1100 GiB per GPU, h100 has 80: 1020 GiB too much; "
        "a generator needs 166 GiB per GPU, h100 has 80: 86 GiB too much"
    )
    assert report.places == 0


def test_a_cache_without_room_for_all_places_names_how_many_there_are() -> None:
    many = config(generation__groups_per_batch=160, generation__engine_args={"tensor_parallel_size": 1})
    report = check_memory(many, LLAMA, H100, LENGTHS)
    assert not report.fits
    assert 0 < report.places < 160 * 16


def test_a_generator_can_have_other_figures_than_the_rooflines() -> None:
    slower = replace(roofline(config(), LLAMA, H100), tensor=1)
    assert campaign_costs(config(), LLAMA, H100, generation=slower).decode(128, 90_000) == slower.decode(128, 90_000)


def test_the_shape_is_that_of_the_models_folder_or_of_bootstrap(tmp_path: Path) -> None:
    assert shape_of_model(config()).hidden == config().model.bootstrap.hidden_size
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100}))
    assert shape_of_model(config(model__path=str(tmp_path))).layers == 2
    with pytest.raises(ModelFolderError):
        shape_of_model(config(model__path=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"pipeline_parallel_size": 2},
            "generation.engine_args.pipeline_parallel_size is 2; a plan knows tensor_parallel_size alone",
        ),
        (
            {"quantization": "awq"},
            'generation.engine_args.quantization is "awq"; a plan knows fp8 alone, or none',
        ),
    ],
)
def test_engine_arguments_without_known_costs_are_one_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        campaign_costs(config(generation__engine_args=arguments), LLAMA, H100)
    assert str(refused.value) == sentence


def test_ranks_on_more_hosts_wait_longer_for_each_other() -> None:
    def train(hosts: int) -> float:
        where = {"hosts": hosts, "work_pool": "gpus", "network": "10.0.0.0/24"}
        slow = replace(H100, network=1e9)
        one = config(placement__train=where, storage__root="s3://runs", weights__host="10.0.0.0/24")
        return campaign_costs(one, LLAMA, slow).train(10_000, 10)

    assert train(8) > 3 * train(2) > 3 * train(1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"training__parallel": {"tensor": 3}},
            "training.parallel.tensor is 3 and the model's num_attention_heads is 32; expected tensor to divide it",
        ),
        (
            {"generation__engine_args": {"tensor_parallel_size": 3}},
            "32 heads and 8 key-value heads can't be divided among 3 workers of vLLM",
        ),
    ],
)
def test_a_layout_that_can_not_be_is_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        campaign_costs(config(**changes), LLAMA, H100)
    assert str(refused.value) == sentence


def test_a_trainer_can_not_divide_the_layers_of_a_mixture_and_generators_can() -> None:
    mixture = model_named("qwen3-30b-a3b")
    assert campaign_costs(config(), mixture, H100).decode(128, 90_000) > 0
    with pytest.raises(InputError, match="can't be divided among tensor ranks"):
        campaign_costs(config(training__parallel={"data": 4, "tensor": 2}), mixture, H100)


def test_a_trainer_has_the_layout_and_formats_of_the_config() -> None:
    setup = trainer_setup(config(training__parallel={"data": 4, "tensor": 2}, training__compute_dtype=None))
    assert (setup.data, setup.tensor, setup.gpus) == (4, 2, 8)
    assert (setup.dtype, setup.compute_dtype) == ("float32", "float32")
    assert generator_gpus(config()) == 2
