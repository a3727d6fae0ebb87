"""Optimizer steps: products in closed form, and what collectives, passes and layouts add."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.planning.costs.assumptions import DEFAULTS
from millrace.planning.costs.hardware import Hardware, hardware_named
from millrace.planning.costs.known_models import model_named
from millrace.planning.costs.links import all_gather_seconds, all_reduce_seconds, group_rate
from millrace.planning.costs.training import (
    TrainerSetup,
    forward_flops,
    mean_context,
    optimizer_seconds,
    step_seconds,
    trained_parameters,
    training_flops,
)
from support.planning.small_policy import SMALL, one_response, small_policy
from torch.utils.flop_counter import FlopCounterMode

H100 = hardware_named("h100")
LLAMA = model_named("llama-8b")
ALONE = TrainerSetup(data=1, max_tokens_per_microbatch=10**9)


def seconds(
    setup: TrainerSetup, hardware: Hardware = H100, *, tokens: float = 1e6, context: float = 500, name: str = "llama-8b"
) -> float:
    return step_seconds(model_named(name), setup, hardware, tokens=tokens, context=context, assumptions=DEFAULTS)


def test_a_token_takes_six_flops_per_parameter_and_less_than_eight_with_checkpointing() -> None:
    layers = LLAMA.layers * LLAMA.layer_parameters
    # The output layer's logits are computed twice, in any case.
    assert training_flops(LLAMA, ALONE, 0) == 6 * layers + 8 * LLAMA.output_parameters
    again = replace(ALONE, activation_checkpointing=True)
    last = LLAMA.layers * LLAMA.hidden * LLAMA.intermediate
    assert training_flops(LLAMA, again, 0) == 8 * (layers + LLAMA.output_parameters) - 2 * last
    assert forward_flops(LLAMA, 0) == 2 * (layers + LLAMA.output_parameters)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_products_are_those_of_the_trainers_policy(checkpointing: bool) -> None:
    tokens = 128
    policy = small_policy(SMALL, checkpointing=checkpointing)
    with FlopCounterMode(display=False) as counter:
        policy(one_response(tokens)).logprobs_N.sum().backward()
    expected = tokens * training_flops(SMALL, replace(ALONE, activation_checkpointing=checkpointing), 0)
    # torch counts matrix products alone: no norms, and no attention on a CPU.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_attention_takes_twelve_flops_per_feature_layer_and_token_seen() -> None:
    seen = training_flops(LLAMA, ALONE, 1000) - training_flops(LLAMA, ALONE, 0)
    assert seen == 12 * 32 * 4096 * 1000


def test_frozen_layers_are_computed_forward_only_and_adapters_without_gradients_of_weights() -> None:
    half = replace(ALONE, frozen_layers=16)
    saved = training_flops(LLAMA, ALONE, 0) - training_flops(LLAMA, half, 0)
    assert saved == 16 * 4 * LLAMA.layer_parameters
    adapters = replace(ALONE, lora_rank=8, lora_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    assert training_flops(LLAMA, adapters, 0) == 4 * LLAMA.layers * LLAMA.layer_parameters + 6 * LLAMA.output_parameters
    # q and o: 4,096 to 4,096; k and v: 4,096 to 1,024.
    assert trained_parameters(LLAMA, adapters) == 32 * 8 * 2 * (4096 + 4096 + 4096 + 1024)
    assert trained_parameters(LLAMA, half) == 16 * LLAMA.layer_parameters + LLAMA.output_parameters + LLAMA.hidden


def test_alone_a_step_takes_its_products_at_the_assumed_share_and_the_optimizers_traffic() -> None:
    products = 1e6 * training_flops(LLAMA, ALONE, 500) / (989e12 * DEFAULTS.mfu)
    update = LLAMA.parameters * 4 * 24 / (3.35e12 * 0.8)
    assert optimizer_seconds(LLAMA, ALONE, H100, DEFAULTS) == pytest.approx(update)
    assert seconds(ALONE) == pytest.approx(products + update)
    assert seconds(ALONE, tokens=0) == 0


def test_several_updates_need_log_probabilities_first_and_a_reference_its_own() -> None:
    forward = 1e6 * forward_flops(LLAMA, 500) / (989e12 * DEFAULTS.mfu)
    update = optimizer_seconds(LLAMA, ALONE, H100, DEFAULTS)
    once = seconds(ALONE)
    assert seconds(replace(ALONE, minibatches=4)) == pytest.approx(once + forward + 3 * update)
    assert seconds(replace(ALONE, epochs=2)) == pytest.approx(2 * once + forward)
    moved = 2 * LLAMA.parameters * 4 / (64e9 * DEFAULTS.host_copy_share)
    assert seconds(replace(ALONE, reference=True)) == pytest.approx(once + forward + moved)


def test_shards_travel_while_layers_compute_and_count_only_where_they_are_slower() -> None:
    wide = TrainerSetup(data=16, max_tokens_per_microbatch=10**9)
    per_rank = seconds(ALONE) / 16
    assert seconds(wide) == pytest.approx(per_rank)
    slow = replace(H100, network=1e9)
    # Gathered in bfloat16 forward and backward, gradients scattered in float32; 8 cards of a host at 0.8 GB/s.
    travel = LLAMA.parameters * (2 + 2 + 4) * 15 / 16 / (8 * 0.8e9)
    update = optimizer_seconds(LLAMA, wide, H100, DEFAULTS)
    assert seconds(wide, slow) == pytest.approx(travel + update)


def test_more_microbatches_gather_more_often() -> None:
    slow = replace(H100, network=1e9)
    whole = TrainerSetup(data=16, max_tokens_per_microbatch=62_500)
    update = optimizer_seconds(LLAMA, whole, slow, DEFAULTS)
    halves = replace(whole, max_tokens_per_microbatch=31_250)
    assert seconds(halves, slow) - update == pytest.approx(2 * (seconds(whole, slow) - update))


def test_tensor_ranks_over_hosts_lower_the_share_of_flops_that_is_reached() -> None:
    def reached(tensor: int) -> float:
        setup = TrainerSetup(data=64 // tensor, tensor=tensor, activation_checkpointing=True)
        products = 1e6 * training_flops(model_named("llama-70b"), setup, 500) / 64 / 989e12
        return products / seconds(setup, name="llama-70b")

    assert 0.25 < reached(8) < reached(2) < DEFAULTS.mfu
    assert reached(16) < reached(8)


def test_a_group_on_several_hosts_uses_the_cards_of_all_its_gpus() -> None:
    assert group_rate(H100, 8, 8, DEFAULTS) == 450e9 * 0.8
    assert group_rate(H100, 16, 8, DEFAULTS) == 400e9 * 0.8
    assert group_rate(H100, 16, 1, DEFAULTS) == 50e9 * 0.8
    assert all_gather_seconds(8e9, H100, 1, 8, DEFAULTS) == 0
    assert all_gather_seconds(8e9, H100, 4, 8, DEFAULTS) == pytest.approx(6e9 / (450e9 * 0.8))
    twice = 2 * all_gather_seconds(8e9, H100, 4, 8, DEFAULTS)
    assert all_reduce_seconds(8e9, H100, 4, 8, DEFAULTS) == pytest.approx(twice + DEFAULTS.nvlink_latency)


@settings(max_examples=100)
@given(
    data=st.sampled_from([1, 2, 8, 16, 64, 256]),
    tensor=st.sampled_from([1, 2, 8, 16]),
    tokens=st.floats(1e3, 1e8),
    checkpointing=st.booleans(),
    minibatches=st.sampled_from([1, 4]),
    faster=st.floats(1, 10),
)
def test_more_tokens_take_longer_and_a_better_machine_does_not(
    data: int, tensor: int, tokens: float, checkpointing: bool, minibatches: int, faster: float
) -> None:
    setup = TrainerSetup(data=data, tensor=tensor, activation_checkpointing=checkpointing, minibatches=minibatches)
    found = seconds(setup, tokens=tokens)
    assert seconds(setup, tokens=tokens * 1.1) >= found
    assert seconds(setup, tokens=tokens, context=600) >= found
    for better in (
        replace(H100, network=H100.network * faster),
        replace(H100, nvlink=H100.nvlink * faster),
        replace(H100, memory_rate=H100.memory_rate * faster),
        replace(H100, flops={dtype: rate * faster for dtype, rate in H100.flops.items()}),
    ):
        assert seconds(setup, better, tokens=tokens) <= found * (1 + 1e-12)


def test_a_token_sees_half_of_its_sequence_on_average() -> None:
    assert mean_context(1000, 10) == 50
    assert mean_context(0, 0) == 0
