"""A model's layers are watched without changing anything, and its tensors leave a device and return as they were."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from support.training.sharded_trainers import CASES, make_trainer, samples
from transformers import LlamaForCausalLM

from millrace.models.modules import call_at_each_layer, decoder_layers, move
from millrace.training.parallel.ranks import ALONE, Ranks

MakeModel = Callable[..., LlamaForCausalLM]
META = torch.device("meta")
"""Stands for a device here: what really goes there leaves the CPU's memory, and shows that by having no values."""
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_layer_of_both_passes_is_seen_and_no_gradient_changes(make_model: MakeModel, checkpointing: bool) -> None:
    plain = make_model().train()
    watched = deepcopy(plain)
    num_layers = len(decoder_layers(watched))
    calls: list[None] = []
    call_at_each_layer(watched, lambda: calls.append(None))
    if checkpointing:
        for model in (plain, watched):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for model in (plain, watched):
        model(input_ids=TOKENS).logits.square().sum().backward()
        if model is plain:
            assert calls == []
    assert len(calls) >= 2 * num_layers
    for (name, parameter), other in zip(plain.named_parameters(), watched.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def test_a_pass_without_gradient_is_seen_once_for_each_layer(make_model: MakeModel) -> None:
    model = make_model()
    calls: list[None] = []
    call_at_each_layer(model, lambda: calls.append(None))
    with torch.inference_mode():
        model(input_ids=TOKENS)
    assert len(calls) == len(decoder_layers(model))


def trained(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """The optimizer after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[1, 3, 4]])).logits.square().sum().backward()
    optimizer.step()
    return optimizer


def test_parameters_buffers_and_moments_all_leave_and_the_count_of_steps_stays(make_model: MakeModel) -> None:
    model = make_model(0)
    optimizer = trained(model)
    assert list(model.buffers()) != []
    move(model, META, optimizer)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {META}
    slots = {(name, value.device.type) for state in optimizer.state.values() for name, value in state.items()}
    assert slots == {("step", "cpu"), ("exp_avg", "meta"), ("exp_avg_sq", "meta")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama aipo", "llama aipo bfloat16", "qwen3 gspo", "qwen3 lora"])
def test_a_trainer_that_sleeps_between_steps_trains_bit_for_bit_as_one_that_does_not(name: str) -> None:
    case = CASES[name]
    awake, sleeper = (make_trainer(case, ALONE, case.compute_dtype) for _ in range(2))
    for number in range(3):
        sleeper.sleep()
        assert sleeper.state() == awake.state(), "it can be saved while it sleeps"
        sleeper.wake()
        batch = samples(5, seed=number)
        expected, result = awake.step(batch), sleeper.step(batch)
        assert result.measured() == expected.measured()
    assert sleeper.next_logprobs([1, 2, 3], 5) == awake.next_logprobs([1, 2, 3], 5)
    assert sleeper.state() == awake.state()


def test_a_trainers_gradients_and_weights_leave_the_device() -> None:
    trainer = make_trainer(CASES["llama aipo"], ALONE, None)
    trainer.step(samples(5, seed=0))
    trainer.sleep()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    # There is no other device here, but one that can't give anything back says who asks it to.
    with pytest.raises(NotImplementedError):
        make_trainer(CASES["llama aipo"], Ranks.alone(META), None).sleep()
