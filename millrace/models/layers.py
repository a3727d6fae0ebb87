"""The decoder's layers of a causal language model, and progress through them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The decoder's layers in order, by name; all supported models keep them in `layers`."""
    names = {module: name for name, module in model.named_modules()}
    return {names[layer]: layer for layer in model.base_model.get_submodule("layers").children()}


def call_at_each_layer(model: PreTrainedModel, call: Callable[[], None]) -> None:
    """Has `call` called after each layer of every forward pass, and before each layer of a backward pass.

    On a GPU the calls of a backward pass come from a thread of autograd's own. No result changes.
    """

    def passed(layer: nn.Module, inputs: Any, output: Any) -> None:
        call()
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: call())  # type: ignore[no-untyped-call]

    for layer in decoder_layers(model).values():
        layer.register_forward_hook(passed)
