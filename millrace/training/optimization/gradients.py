"""The gradient between the backward passes and the optimizer."""

import math
from collections.abc import Collection

import torch
from torch.distributed.tensor import DTensor

from millrace.errors import TrainingDiverged


def zero_gradients(parameters: Collection[torch.nn.Parameter]) -> None:
    """Sets the gradient to 0, not to None: AdamW's momentum moves the weights in a step without gradient too."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            # In place: taking as much memory from the system again can cost as much as the optimizer's update.
            parameter.grad.zero_()


def clipped_norm(parameters: Collection[torch.nn.Parameter], max_norm: float, what: str) -> float:
    """Scales the gradient down to an L2 norm of at most `max_norm`; returns its norm before that.

    Raises TrainingDiverged, naming `what` the gradient is of, if the norm is not finite.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    # Read once: a GPU is waited for.
    value: float = norm.item()
    if not math.isfinite(value):
        raise TrainingDiverged(
            f"{what} has norm {value}; expected a finite one, as fresher rollouts or a smaller learning rate keep it"
        )
    return value
