"""Moves what is on a device to the CPU's memory and back, bit for bit."""

import torch
from torch import nn

_STEP = "step"
"""AdamW counts its steps on the CPU, whatever it trains on."""


def move(module: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Moves the parameters, gradients and buffers of `module` to `device`, and what `optimizer` keeps of them.

    They stay the same parameters, sharded or not (FSDP2 follows its module). What CUDA then keeps in reserve goes back
    too: another process is to have it.
    """
    module.to(device)
    if optimizer is not None:
        for slots in optimizer.state.values():
            for name in slots.keys() - {_STEP}:
                slots[name] = slots[name].to(device)
    torch.cuda.empty_cache()
