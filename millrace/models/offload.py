"""Moves a model and its optimizer between a device and the CPU, bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_STEP = "step"
"""AdamW keeps its step count on the CPU."""


def move(module: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Moves the parameters, gradients and buffers of `module`, and the state of `optimizer`, to `device`.

    The parameter objects stay the same, sharded or not (FSDP2 follows its module). CUDA's reserved memory is freed for
    other processes.
    """
    module.to(device)
    if optimizer is not None:
        for slots in optimizer.state.values():
            for name in slots.keys() - {_STEP}:
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
