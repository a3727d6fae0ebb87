"""Optimizer steps and the trainer's memory: closed forms, and the trainer's own policy."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning.small_policy import SMALL, one_response, small_policy
from torch.utils.flop_counter import FlopCounterMode

from configs.schema import RunConfig
from millrace.planning.hardware import (
    GIB,
    Hardware,
    all_gather_seconds,
    all_reduce_seconds,
    hardware_named,
)
from millrace.planning.memory import generator_memory, layer_activations, trainer_memory
from millrace.planning.models import ModelShape, model_named
from millrace.planning.training import MFU, step_seconds, trained_parameters, training_flops

H100 = hardware_named("h100")
LLAMA = model_named("llama-8b")
BASE = RunConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "training": {"max_steps": 1, "compute_dtype": "bfloat16", "max_tokens_per_microbatch": 2048},
    }
)


def trainer(
    data: int = 1, tensor: int = 1, *, reference: bool = False, lora: object = None, **changes: object
) -> RunConfig:
    """A config that trains in this layout; nothing else of it matters here."""
    training = BASE.training
    changes["parallel"] = training.parallel.model_copy(update={"data": data, "tensor": tensor})
    changes["kl"] = training.kl.model_copy(update={"coefficient": 0.1 * reference})
    if lora is not None:
        changes["lora"] = training.lora.model_copy(update=lora)
    return BASE.model_copy(update={"training": training.model_copy(update=changes)})


def alone(**changes: object) -> RunConfig:
    """One GPU, and microbatches of everything."""
    return trainer(max_tokens_per_microbatch=10**9, **changes)  # type: ignore[arg-type]


UPDATE = LLAMA.parameters * 4 * 24 / (3.35e12 * 0.8)
"""AdamW's traffic in HBM, on one GPU."""


def seconds(
    config: RunConfig, hardware: Hardware = H100, *, tokens: float = 1e6, rollouts: int = 1000, name: str = "llama-8b"
) -> float:
    return step_seconds(model_named(name), config, hardware, tokens=tokens, rollouts=rollouts)


def forward_seconds() -> float:
    flops = 2 * (LLAMA.layers * LLAMA.layer_parameters + LLAMA.output_parameters) + 4 * 32 * 4096 * 500
    return 1e6 * flops / (989e12 * MFU)


def test_a_token_takes_six_flops_per_parameter_or_eight_with_checkpointing() -> None:
    layers = LLAMA.layers * LLAMA.layer_parameters
    # The output layer's logits are computed twice, in any case.
    assert training_flops(LLAMA, alone(), 0) == 6 * layers + 8 * LLAMA.output_parameters
    again = alone(activation_checkpointing=True)
    last = LLAMA.layers * LLAMA.hidden * LLAMA.intermediate
    assert training_flops(LLAMA, again, 0) == 8 * (layers + LLAMA.output_parameters) - 2 * last
    # Attention: twelve FLOPs per feature, layer and token seen.
    assert training_flops(LLAMA, alone(), 1000) - training_flops(LLAMA, alone(), 0) == 12 * 32 * 4096 * 1000


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_products_are_those_of_the_trainers_policy(checkpointing: Literal[False, True, "selective"]) -> None:
    tokens = 128
    policy = small_policy(SMALL, checkpointing=checkpointing)
    with FlopCounterMode(display=False) as counter:
        policy(one_response(tokens))[0].sum().backward()
    expected = tokens * training_flops(SMALL, alone(activation_checkpointing=checkpointing), 0)
    # torch counts matrix products alone: no norms, and no attention on a CPU.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def kept_bytes(shape: ModelShape, tokens: int, *, checkpointing: bool) -> int:
    """Bytes that the policy keeps in bfloat16 for the backward pass of `tokens` tokens, parameters aside."""
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
def test_a_layer_keeps_the_activations_of_the_trainers_policy(checkpointing: bool) -> None:
    deeper, tokens = replace(SMALL, layers=4), 128
    kept = [kept_bytes(shape, tokens, checkpointing=checkpointing) for shape in (SMALL, deeper)]
    per_layer = SMALL.hidden if checkpointing else layer_activations(SMALL, 1)
    assert kept[1] - kept[0] == pytest.approx(2 * tokens * 2 * per_layer, rel=0.02)


def test_selective_checkpointing_needs_memory_between_that_of_none_and_of_all() -> None:
    of = {it: trainer_memory(LLAMA, alone(activation_checkpointing=it)).total for it in (True, "selective", False)}
    assert of[True] < of["selective"] < of[False]


def test_frozen_layers_and_adapters_save_backward_products() -> None:
    half = alone(frozen_layers=16)
    assert training_flops(LLAMA, alone(), 0) - training_flops(LLAMA, half, 0) == 16 * 4 * LLAMA.layer_parameters
    assert trained_parameters(LLAMA, half) == 16 * LLAMA.layer_parameters + LLAMA.output_parameters
    adapters = alone(lora={"rank": 8})
    assert training_flops(LLAMA, adapters, 0) == 4 * LLAMA.layers * LLAMA.layer_parameters + 6 * LLAMA.output_parameters
    # q and o: 4,096 to 4,096; k and v: 4,096 to 1,024, counted as if they were as wide.
    assert trained_parameters(LLAMA, adapters) == pytest.approx(32 * 8 * 2 * (8192 + 5120), rel=0.25)


def test_a_step_is_products_optimizer_traffic_and_log_probability_passes() -> None:
    once = 1e6 * training_flops(LLAMA, alone(), 500) / (989e12 * MFU) + UPDATE
    assert seconds(alone()) == pytest.approx(once)
    assert seconds(alone(), tokens=0) == 0
    assert seconds(alone(minibatches=4)) == pytest.approx(once + forward_seconds() + 3 * UPDATE)
    assert seconds(alone(epochs=2)) == pytest.approx(2 * once + forward_seconds())
    assert seconds(alone(reference=True)) == pytest.approx(once + forward_seconds())


def test_gathers_count_only_where_they_are_slower_than_products() -> None:
    wide = trainer(data=16, max_tokens_per_microbatch=62_500)
    assert seconds(wide) == pytest.approx(seconds(alone()) / 16)
    slow = replace(H100, network=1e9)
    # Gathered in bfloat16 forward and backward, gradients scattered in float32; 8 cards of a host at 0.8 GB/s.
    travel = LLAMA.parameters * (2 + 2 + 4) * 15 / 16 / (8 * 0.8e9)
    assert seconds(wide, slow) == pytest.approx(travel + UPDATE / 16)
    halves = trainer(data=16, max_tokens_per_microbatch=31_250)
    assert seconds(halves, slow) == pytest.approx(2 * travel + UPDATE / 16)


def test_tensor_ranks_over_hosts_lower_the_share_of_flops_that_is_reached() -> None:
    def reached(tensor: int) -> float:
        setup = trainer(
            data=64 // tensor, tensor=tensor, activation_checkpointing=True, max_tokens_per_microbatch=16_384
        )
        products = 1e6 * training_flops(model_named("llama-70b"), setup, 500) / 64 / 989e12
        return products / seconds(setup, name="llama-70b")

    assert 0.25 < reached(8) < reached(2) < MFU
    assert reached(16) < reached(8)


def test_collectives_take_their_bytes_over_the_narrowest_link() -> None:
    assert all_gather_seconds(8e9, H100, 1, 8) == 0
    assert all_gather_seconds(8e9, H100, 4, 8) == pytest.approx(6e9 / (450e9 * 0.8))
    # A group on several hosts uses the cards of all its GPUs.
    assert all_gather_seconds(16e9, H100, 16, 8) == pytest.approx(15e9 / (400e9 * 0.8))
    twice = 2 * all_gather_seconds(8e9, H100, 4, 8)
    assert all_reduce_seconds(8e9, H100, 4, 8) == pytest.approx(twice + 20e-6)


@settings(max_examples=50)
@given(
    data=st.sampled_from([1, 2, 8, 64]),
    tensor=st.sampled_from([1, 2, 8]),
    tokens=st.floats(1e3, 1e8),
    faster=st.floats(1, 10),
)
def test_more_tokens_take_longer_and_a_better_machine_does_not(
    data: int, tensor: int, tokens: float, faster: float
) -> None:
    setup = trainer(data, tensor, max_tokens_per_microbatch=16_384)
    base = seconds(setup, tokens=tokens)
    assert seconds(setup, tokens=tokens * 1.1) >= base
    for better in (
        replace(H100, network=H100.network * faster),
        replace(H100, nvlink=H100.nvlink * faster),
        replace(H100, flops={dtype: rate * faster for dtype, rate in H100.flops.items()}),
    ):
        assert seconds(setup, better, tokens=tokens) <= base * (1 + 1e-12)


@pytest.mark.parametrize(
    ("model", "setup", "fits"),
    [
        ("llama-8b", {"data": 8, "activation_checkpointing": True}, True),
        ("llama-8b", {"data": 8, "max_tokens_per_microbatch": 16_384}, False),
        # 16 bytes of 8.03 billion parameters alone are 119.7 GiB.
        ("llama-8b", {"data": 1, "activation_checkpointing": True, "max_tokens_per_microbatch": 1}, False),
        (
            "llama-8b",
            {"data": 1, "lora": {"rank": 16, "target_modules": ["q_proj"]}, "activation_checkpointing": True},
            True,
        ),
        # 8 bytes are 59.8 GiB.
        (
            "llama-8b",
            {"data": 1, "activation_checkpointing": True, "max_tokens_per_microbatch": 1, "optimizer_offload": True},
            True,
        ),
        ("llama-405b", {"data": 32, "tensor": 8, "activation_checkpointing": True}, True),
        ("llama-405b", {"data": 8, "tensor": 8, "activation_checkpointing": True}, False),
    ],
)
def test_known_models_fit_into_known_gpus(model: str, setup: dict[str, object], fits: bool) -> None:
    layout = trainer(**setup)  # type: ignore[arg-type]
    assert (trainer_memory(model_named(model), layout).total <= H100.memory_bytes) is fits


def test_a_generator_holds_its_share_of_the_weights_and_the_cache() -> None:
    def generator(tensor: int, cached: float) -> float:
        formats = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
        return generator_memory(LLAMA, H100, tensor=tensor, cached_tokens=cached, memory_share=None, **formats)

    # 128 KiB of cache per token; a key-value head is on several GPUs if there are fewer heads.
    assert generator(1, 8192) - generator(1, 0) == pytest.approx(GIB)
    assert generator(16, 8192) - generator(16, 0) == pytest.approx(GIB / 8)
    assert generator(1, 0) - generator(2, 0) == pytest.approx(LLAMA.parameters)
