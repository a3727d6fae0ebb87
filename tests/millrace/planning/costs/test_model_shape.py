"""Sizes of models are those that were published, and those of transformers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.schema import BootstrapConfig
from millrace.errors import InputError, ModelFolderError
from millrace.planning.costs.known_models import MODELS, model_named
from millrace.planning.costs.model_shape import shape_of_bootstrap, shape_of_config, shape_of_folder
from millrace.weights.direct.layout import TensorSpec

# Billions, all and active, by their model cards.
_PUBLISHED = {
    "llama-8b": 8.03,
    "llama-70b": 70.55,
    "llama-405b": 405.85,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_its_published_number_of_parameters(name: str) -> None:
    shape = model_named(name)
    assert shape.parameters / 1e9 == pytest.approx(_PUBLISHED[name], abs=0.006)
    assert shape.parameters == sum(math.prod(spec.shape) for spec in shape.tensors())


@pytest.mark.parametrize(
    ("name", "config", "module"),
    [
        ("llama-8b", LlamaConfig, LlamaForCausalLM),
        ("qwen2.5-7b", Qwen2Config, Qwen2ForCausalLM),
        ("qwen3-4b", Qwen3Config, Qwen3ForCausalLM),
        ("qwen3-30b-a3b", Qwen3MoeConfig, Qwen3MoeForCausalLM),
    ],
)
def test_names_and_shapes_are_those_of_transformers(name: str, config: type, module: type) -> None:
    small = replace(model_named(name), layers=2)
    sizes = config(
        num_hidden_layers=small.layers,
        hidden_size=small.hidden,
        intermediate_size=small.intermediate,
        moe_intermediate_size=small.intermediate,
        num_experts=small.experts,
        num_experts_per_tok=small.experts_per_token,
        num_attention_heads=small.heads,
        num_key_value_heads=small.kv_heads,
        head_dim=small.head_dim,
        vocab_size=small.vocabulary,
        tie_word_embeddings=small.tied,
    )
    with torch.device("meta"):
        theirs = {name: tuple(tensor.shape) for name, tensor in module(sizes).named_parameters()}
    assert {spec.name: spec.shape for spec in small.tensors()} == theirs
    if not small.experts:
        assert list(small.tensors()) == [TensorSpec(name, "bfloat16", shape) for name, shape in theirs.items()]
    assert replace(shape_of_config(sizes.to_dict(), "a folder"), name=small.name) == small


def test_three_of_thirty_billion_parameters_compute_a_token_of_a_mixture() -> None:
    mixture = model_named("qwen3-30b-a3b")
    # 3.3 with the embeddings.
    assert mixture.active_parameters / 1e9 == pytest.approx(3.04, abs=0.01)
    assert mixture.touched_parameters(1) == pytest.approx(mixture.active_parameters)
    # Nearly all experts have a token in a large step.
    assert mixture.touched_parameters(512) > 0.99 * (mixture.parameters - mixture.vocabulary * mixture.hidden)


def test_a_token_of_llama_takes_128_kib_of_cache_and_two_flops_per_parameter() -> None:
    shape = model_named("llama-8b")
    assert shape.kv_bytes() == 128 * 1024
    assert shape.kv_bytes("fp8") == 64 * 1024
    # Of all parameters, the embeddings and the last norm are no factor of a product.
    assert shape.forward_flops(0) == 2 * (shape.parameters - shape.vocabulary * shape.hidden - shape.hidden)
    assert shape.forward_flops(1000) - shape.forward_flops(0) == 4 * 32 * 4096 * 1000


def test_a_folder_says_its_sizes(tmp_path: Path) -> None:
    values = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = shape_of_folder(tmp_path)
    assert (shape.kv_heads, shape.head_dim, shape.tied) == (4, 16, False)
    del values["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelFolderError, match=r"its config\.json has no vocab_size"):
        shape_of_folder(tmp_path)
    with pytest.raises(ModelFolderError, match="can't be read"):
        shape_of_folder(tmp_path / "elsewhere")


def test_the_start_model_has_the_sizes_of_bootstrap() -> None:
    shape = shape_of_bootstrap(BootstrapConfig(hidden_size=64, num_heads=4, num_layers=3, intermediate_size=256), 20)
    assert shape.parameters == 20 * 64 + 64 + 3 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64)


def test_a_model_without_sizes_is_one_sentence() -> None:
    with pytest.raises(
        InputError, match=r'the sizes of "gpt-9" are not known; expected a model\'s folder or one of llama'
    ):
        model_named("gpt-9")
