"""Optimizer updates: the samples of each, the learning rate, gradient clipping, AdamW, and frozen layers.

The learning rate of a step is a pure function of the policy version, and of nothing that a checkpoint would hold:

    share of the full rate
    1   ┤      ╭───╮
        │    ╱      ╲                 warm-up: w steps, each a (w + 1)th more than the one before
        │  ╱          ╲               decay: from the full rate at step w + 1 to the final share after `steps`
    f   ┤╱              ╰────────     all later steps: the final share
        └┬────┬─────────┬────────► step = policy version that it makes, from 1
         1    w       steps

With `ess_scaling` an update's rate is also multiplied by √ESS of its importance ratios.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from configs.training import TrainingConfig
from millrace.errors import TrainingDiverged
from millrace.training.batch import Sample

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names of its two moments."""


def plan_updates(
    samples: Sequence[Sample], *, minibatches: int, epochs: int, seed: int, policy_version: int
) -> list[list[int]]:
    """The indices of the samples of each update on a batch, ascending; at least one update.

    Each epoch shuffles the groups and cuts them into minibatches, which differ by at most one group. The order follows
    from the run's seed and the policy version that the batch makes, so a trainer that repeats the batch, and a replay,
    make the same updates. Groups without a trainable token are in no minibatch, unless it is the batch.
    """
    carrying = sorted({sample.group for sample in samples if np.count_nonzero(sample.loss_mask)})
    if minibatches == 1 or not carrying:
        return [list(range(len(samples))) for _ in range(epochs)]
    plan = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, policy_version, epoch]).permutation(carrying)
        for part in np.array_split(order, min(minibatches, len(carrying))):
            groups = set(part.tolist())
            plan.append([index for index, sample in enumerate(samples) if sample.group in groups])
    return plan


def planned_rate(training: TrainingConfig, step: int) -> float:
    """Learning rate of the step that makes policy version `step`, before √ESS and without rollbacks."""
    schedule, warmup = training.schedule, training.schedule.warmup_steps
    share = 1.0
    if step <= warmup:
        share = step / (warmup + 1)
    elif schedule.decay != "constant" and schedule.steps is not None:
        progress = min(1.0, (step - 1 - warmup) / (schedule.steps - warmup))
        left = 1 - progress if schedule.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
        share = schedule.final_share + (1 - schedule.final_share) * left
    return training.learning_rate * share


def make_optimizer(parameters: Iterable[nn.Parameter], training: TrainingConfig, device: torch.device) -> AdamW:
    """AdamW of `parameters`, which compute on `device`. It keeps its moments there or, offloaded, on the host."""
    adamw = training.adamw
    return (OffloadedAdamW if training.optimizer_offload else AdamW)(
        parameters,
        lr=training.learning_rate,
        betas=(adamw.beta1, adamw.beta2),
        eps=adamw.epsilon,
        weight_decay=training.weight_decay,
        # One kernel that needs no intermediates. On the CPU it would round differently than ever before.
        fused=device.type == "cuda",
    )


class OffloadedAdamW(AdamW):
    """AdamW whose moments are in the host's memory, pinned; those of one parameter at a time are on the device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates one parameter after the other: its moments to the device, update, its moments back."""
        [group] = self.param_groups
        try:
            for parameter in group["params"]:
                self.param_groups = [group | {"params": [parameter]}]
                slots, host = self.state[parameter], dict(self.state[parameter])
                for name in slots.keys() & MOMENTS:
                    slots[name] = slots[name].to(parameter.device, non_blocking=True)
                super().step()
                for name in slots.keys() & MOMENTS:
                    buffer = host[name] if name in host else empty_moment(self, slots[name])
                    slots[name] = buffer.copy_(slots[name], non_blocking=True)
        finally:
            self.param_groups = [group]
        if parameter.is_cuda:
            # The copies back are done before a checkpoint reads them.
            torch.cuda.current_stream().synchronize()


def empty_moment(optimizer: torch.optim.Optimizer, like: torch.Tensor) -> torch.Tensor:
    """A moment like `like`, a parameter or another moment, where `optimizer` keeps moments between updates."""
    if not isinstance(optimizer, OffloadedAdamW):
        return torch.empty_like(like)
    return torch.empty_like(like, device=torch.device("cpu"), pin_memory=like.is_cuda)


def zero_gradients(parameters: Collection[nn.Parameter]) -> None:
    """Sets the gradient to 0, not to None: AdamW's momentum moves the weights in a step without gradient too."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            # In place: taking as much memory from the system again can cost as much as the optimizer's update.
            parameter.grad.zero_()


def clip_gradients(parameters: Collection[nn.Parameter], max_norm: float, what: str) -> float:
    """Scales the gradient down to an L2 norm of at most `max_norm`; returns its norm before that.

    Raises TrainingDiverged, naming `what` the gradient is of, if the norm is not finite.
    """
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    # Read once: a GPU is waited for.
    value: float = norm.item()
    if not math.isfinite(value):
        raise TrainingDiverged(
            f"{what} has norm {value}; expected a finite one, as fresher rollouts or a smaller learning rate keep it"
        )
    return value


def freeze_prefix(model: PreTrainedModel, num_layers: int) -> None:
    """Freezes the embeddings and the first `num_layers` decoder layers of `model`, at least one, in place.

    The backward pass ends above them, and so do stored activations. Where the output layer's weight is the embeddings',
    it is frozen with them.
    """
    layers = model.base_model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    for module in (model.get_input_embeddings(), *layers[:num_layers]):
        module.requires_grad_(False)
