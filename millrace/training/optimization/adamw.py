"""AdamW as the config has it."""

from collections.abc import Iterable

import torch

from configs.training import TrainingConfig


def make_adamw(parameters: Iterable[torch.nn.Parameter], training: TrainingConfig) -> torch.optim.AdamW:
    """The optimizer of `parameters`, at the full learning rate and without state."""
    own = training.adamw
    return torch.optim.AdamW(
        parameters,
        lr=training.learning_rate,
        betas=(own.beta1, own.beta2),
        eps=own.epsilon,
        weight_decay=training.weight_decay,
    )
