"""Adapters: what they leave alone, and what generators get."""

import pytest
import torch
from peft.tuners.lora import LoraLayer
from support.training.sharded_trainers import tiny_qwen3
from transformers import PreTrainedModel

from millrace.errors import InputError
from millrace.training.lora import add_adapters, is_adapter
from millrace.training.parallel.sharding import full_tensors

TARGETS = ["q_proj", "down_proj"]


def adapted(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose adapters add something to their weights."""
    model = tiny_qwen3().to(dtype)
    add_adapters(model, rank=4, alpha=8.0, target_modules=TARGETS)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_only_adapters_have_a_gradient_and_they_are_of_the_models_type() -> None:
    model = adapted(torch.bfloat16)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * len(TARGETS) * 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_new_adapter_changes_nothing() -> None:
    model, base = tiny_qwen3(), dict(tiny_qwen3().named_parameters())
    add_adapters(model, rank=4, alpha=8.0, target_modules=TARGETS)
    for name, tensor in full_tensors(model):
        assert torch.equal(tensor, base[name]), name


def test_merged_weights_have_the_base_models_names_and_are_those_that_peft_makes() -> None:
    model = adapted()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    merged = dict(full_tensors(model))
    assert merged.keys() == dict(tiny_qwen3().named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), f"{name} was changed"
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            tensor = merged[name.replace(".base_layer.", ".")]
            torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-6, atol=1e-7, msg=name)


def test_adapters_in_bfloat16_are_added_up_before_they_are_rounded() -> None:
    model = adapted(torch.bfloat16)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    weight, down, up = (
        layer.get_parameter(name).float()
        for name in ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    )
    merged = dict(full_tensors(model))["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(merged, (weight + up @ down * 2.0).bfloat16())


def test_a_target_that_is_no_linear_layer_is_named() -> None:
    with pytest.raises(InputError, match=r"target_modules has input_layernorm, qkv_proj, and .* some of down_proj, "):
        add_adapters(tiny_qwen3(), rank=4, alpha=8.0, target_modules=["q_proj", "qkv_proj", "input_layernorm"])
