"""Progress through the layers of a model can be seen, and changes nothing."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from transformers import LlamaForCausalLM

from millrace.models.modules import call_at_each_layer, decoder_layers

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_layer_of_both_passes_is_seen_and_no_gradient_changes(
    make_model: Callable[..., LlamaForCausalLM], checkpointing: bool
) -> None:
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


def test_a_pass_without_gradient_is_seen_once_for_each_layer(make_model: Callable[..., LlamaForCausalLM]) -> None:
    model = make_model()
    calls: list[None] = []
    call_at_each_layer(model, lambda: calls.append(None))
    with torch.inference_mode():
        model(input_ids=TOKENS)
    assert len(calls) == len(decoder_layers(model))
