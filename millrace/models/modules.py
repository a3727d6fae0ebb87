"""A model's modules, as trainer and engines watch and move them: its layers, its routers, its tensors' device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOT_RECORDED = 2**16 - 1
"""Stands for an expert where none was recorded."""
_STEP = "step"
"""AdamW keeps its step count on the CPU, unless it is fused."""


def decoder_layers(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The decoder's layers in order, by name; all supported models keep them in `layers`."""
    names = {module: name for name, module in model.named_modules()}
    return {names[layer]: layer for layer in model.base_model.get_submodule("layers").children()}


def call_at_each_layer(model: "PreTrainedModel", call: Callable[[], None]) -> None:
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


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of `model` in the order of its layers; none unless it is a mixture of experts.

    A router's forward pass gives (logits [T, experts], weights [T, k], ids of the chosen experts [T, k]) of T tokens.
    """
    # All families' routers in transformers are called so: MixtralTopKRouter, GptOssTopKRouter, …
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


class ExpertRecorder:
    """Records which experts compute each token, for trainers that route by them (R3, arXiv 2510.11370)."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ValueError for a model without experts."""
        self._by_layer: list[torch.Tensor] = []
        if not routers(model):
            raise ValueError("the model has no experts to record")
        for router in routers(model):
            router.register_forward_hook(lambda module, inputs, output: self._by_layer.append(output[2]))

    def take(self) -> torch.Tensor:
        """[T, layers, k] uint16 on the CPU: experts of the tokens of the forward pass since the last call."""
        experts_TLK = torch.stack(self._by_layer, dim=1)
        self._by_layer.clear()
        # No model has as many experts as there are ids.
        return experts_TLK.cpu().to(torch.uint16)


def move(module: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Moves the parameters, gradients and buffers of `module`, and the state of `optimizer`, to `device`, bit for bit.

    The parameter objects stay the same, sharded or not (FSDP2 follows its module). CUDA's reserved memory is freed for
    other processes.
    """
    module.to(device)
    if optimizer is not None:
        stays = set() if optimizer.defaults["fused"] else {_STEP}
        for slots in optimizer.state.values():
            for name in slots.keys() - stays:
                slots[name] = slots[name].to(device)
    torch.cuda.empty_cache()


@contextmanager
def visiting(module: nn.Module, device: torch.device) -> Iterator[None]:
    """`module`, which never changes, is on `device` for the `with` block, and on the CPU before and after.

    Its values on the CPU are kept meanwhile, so nothing but buffers is copied back.
    """
    home = {id(parameter): parameter.data for parameter in module.parameters()}
    module.to(device)
    try:
        yield
    finally:
        # As `to` does it, which FSDP2 follows.
        module._apply(  # type: ignore[no-untyped-call]
            lambda tensor: home[id(tensor)] if id(tensor) in home else tensor.cpu()
        )
