"""Memory of trainers and generators: known cases, and what does not fit in a sentence."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.planning.costs.assumptions import DEFAULTS
from millrace.planning.costs.hardware import hardware_named
from millrace.planning.costs.known_models import MODELS, model_named
from millrace.planning.costs.memory import (
    GeneratorMemory,
    TrainerMemory,
    cache_places,
    generator_memory,
    shortfall,
    trainer_memory,
)
from millrace.planning.costs.model_shape import ModelShape
from millrace.planning.costs.training import TrainerSetup
from support.planning.small_policy import SMALL, one_response, small_policy

GIB = 2**30
H100 = hardware_named("h100")


def trainer(name: str, setup: TrainerSetup) -> TrainerMemory:
    return trainer_memory(model_named(name), setup, DEFAULTS)


def generator(name: str = "llama-8b", tensor: int = 1, dtype: str = "bfloat16", cached: float = 0.0) -> GeneratorMemory:
    return generator_memory(
        model_named(name),
        tensor=tensor,
        dtype=dtype,
        kv_dtype="bfloat16",
        cached_tokens=cached,
        longest_tokens=2048,
        hardware=H100,
        assumptions=DEFAULTS,
    )


def test_weights_gradients_and_moments_in_float32_take_16_bytes_per_parameter_over_all_gpus() -> None:
    for data in (1, 8, 64):
        found = trainer("llama-8b", TrainerSetup(data=data))
        assert found.states == pytest.approx(16 * model_named("llama-8b").parameters / data)
    bf16 = trainer("llama-8b", TrainerSetup(data=8, dtype="bfloat16"))
    assert bf16.states == pytest.approx(8 * model_named("llama-8b").parameters / 8)


def test_tensor_ranks_divide_layers_and_each_has_a_share_of_the_rest_by_data_ranks() -> None:
    shape = model_named("llama-70b")
    found = trainer("llama-70b", TrainerSetup(data=8, tensor=8))
    assert found.states == pytest.approx(16 * (shape.layers * shape.layer_parameters / 64 + shape.other_parameters / 8))


def kept_bytes(shape: ModelShape, tokens: int, *, checkpointing: bool) -> int:
    """Bytes that the policy keeps in bfloat16 for the backward pass of so many tokens, parameters aside."""
    policy = small_policy(shape, checkpointing=checkpointing).to(torch.bfloat16)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Held, so that no other tensor gets its address.
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(one_response(tokens))
    return sum(kept[address].untyped_storage().nbytes() for address in kept.keys() - parameters)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_keeps_as_many_activations_as_the_trainers_policy(checkpointing: bool) -> None:
    shape, deeper, tokens = SMALL, replace(SMALL, layers=4), 128
    measured = kept_bytes(deeper, tokens, checkpointing=checkpointing) - kept_bytes(
        shape, tokens, checkpointing=checkpointing
    )
    setup = TrainerSetup(data=1, max_tokens_per_microbatch=tokens, activation_checkpointing=checkpointing)
    two = trainer_memory(deeper, setup, DEFAULTS).activations - trainer_memory(shape, setup, DEFAULTS).activations
    # Norms and attention also keep a few numbers per token.
    assert two <= measured <= 1.01 * two


def test_8b_in_float32_trains_on_8_h100_with_checkpointing_and_not_without() -> None:
    setup = TrainerSetup(data=8, activation_checkpointing=True)
    assert trainer("llama-8b", setup).total < 40 * GIB
    whole = trainer("llama-8b", replace(setup, activation_checkpointing=False))
    # 32 layers of 16,384 tokens of 204 KiB each.
    assert whole.activations / GIB == pytest.approx(102, abs=0.5)
    assert shortfall("the trainer", whole.total, H100) is not None


def test_8b_in_float32_does_not_train_on_one_h100() -> None:
    found = trainer("llama-8b", TrainerSetup(data=1, activation_checkpointing=True, max_tokens_per_microbatch=2048))
    # 16 bytes of 8.03 billion parameters alone are 119.7 GiB.
    assert found.states / GIB == pytest.approx(119.7, abs=0.1)


def test_405b_in_float32_trains_on_256_h100_and_not_on_64() -> None:
    setup = TrainerSetup(data=32, tensor=8, activation_checkpointing=True, max_tokens_per_microbatch=2048)
    assert shortfall("the trainer", trainer("llama-405b", setup).total, H100) is None
    small = trainer("llama-405b", replace(setup, data=8))
    assert shortfall("the trainer", small.total, H100) is not None


def test_frozen_layers_and_adapters_need_no_gradients_and_moments() -> None:
    shape = model_named("llama-8b")
    adapters = trainer("llama-8b", TrainerSetup(data=1, lora_rank=16, lora_modules=("q_proj",)))
    assert 4 * shape.parameters < adapters.states < 4.1 * shape.parameters
    half = trainer("llama-8b", TrainerSetup(data=1, frozen_layers=16))
    assert 4 * shape.parameters < half.states < 11 * shape.parameters
    assert half.activations == trainer("llama-8b", TrainerSetup(data=1)).activations / 2


def test_a_reference_policy_needs_memory_only_where_it_needs_more_than_activations() -> None:
    setup = TrainerSetup(data=1, reference=True, activation_checkpointing=True, max_tokens_per_microbatch=1024)
    without = trainer("llama-8b", replace(setup, reference=False))
    assert trainer("llama-8b", setup).total > without.total
    many = replace(setup, data=64, max_tokens_per_microbatch=65_536)
    assert trainer("llama-8b", many).total == trainer("llama-8b", replace(many, reference=False)).total


def test_a_generator_holds_its_share_of_weights_and_cache() -> None:
    found = generator("llama-70b", tensor=8, cached=100_000)
    assert found.weights == pytest.approx(2 * model_named("llama-70b").parameters / 8)
    # 320 KiB per token of 80 layers and 8 heads, one of which each GPU has.
    assert found.cache == 100_000 * 320 * 1024 / 8
    assert generator("llama-70b", tensor=8, dtype="fp8").weights == found.weights / 2


def test_70b_in_bf16_generates_on_four_h100_and_not_on_one() -> None:
    assert shortfall("a generator", generator("llama-70b", tensor=4, cached=50_000).total, H100) is None
    assert shortfall("a generator", generator("llama-70b").total, H100) == (
        "a generator needs 142 GiB per GPU, h100 has 80: 62 GiB too much"
    )


def test_places_are_as_many_as_the_cache_has_room_for() -> None:
    full = generator(cached=1_000_000)
    room = 0.92 * 80 - 4 - 8.03e9 * 2 / GIB
    assert cache_places(full, H100, 1000) == pytest.approx(1000 * room / (1_000_000 * 128 * 1024 / GIB), abs=1)
    assert cache_places(generator(cached=1000), H100, 100) == 100
    assert cache_places(generator("llama-70b", cached=1000), H100, 100) == 0


@settings(max_examples=100)
@given(
    name=st.sampled_from(sorted(MODELS)),
    data=st.sampled_from([1, 4, 32, 256]),
    tensor=st.sampled_from([1, 2, 8]),
    tokens=st.integers(1024, 65_536),
    checkpointing=st.booleans(),
    reference=st.booleans(),
    cached=st.integers(0, 10**7),
)
def test_more_gpus_or_less_work_never_need_more_of_a_gpu(
    name: str, data: int, tensor: int, tokens: int, checkpointing: bool, reference: bool, cached: int
) -> None:
    setup = TrainerSetup(
        data=data,
        tensor=tensor,
        max_tokens_per_microbatch=tokens,
        activation_checkpointing=checkpointing,
        reference=reference,
    )
    needed = trainer(name, setup).total
    for lighter in (
        {"data": max(2, data) * 2},
        {"activation_checkpointing": True},
        {"max_tokens_per_microbatch": tokens // 2},
        {"reference": False},
        {"frozen_layers": 4},
        {"dtype": "bfloat16"},
    ):
        assert trainer(name, replace(setup, **lighter)).total <= needed  # type: ignore[arg-type]
    assert (
        generator(name, tensor=2 * tensor, cached=cached).total <= generator(name, tensor=tensor, cached=cached).total
    )
    assert (
        generator(name, tensor=tensor, cached=cached).total <= generator(name, tensor=tensor, cached=cached + 1).total
    )
