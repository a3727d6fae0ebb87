"""A trainer on a tiny model, and batches of several groups for it."""

from typing import Any

import numpy as np
import torch
from support.engines.one_by_one import response_logprobs, taken
from support.training.samples import make_sample
from transformers import LlamaForCausalLM, PreTrainedModel

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.trainer import Trainer

SEED = 3
_DEFAULTS: dict[str, Any] = {
    "max_steps": 9,
    "loss": "reinforce",
    "learning_rate": 1e-2,
    "max_grad_norm": 1e9,
    "max_tokens_per_microbatch": 40,
}


def make_trainer(
    model: LlamaForCausalLM, *, reference: LlamaForCausalLM | None = None, seed: int = SEED, **parameters: Any
) -> Trainer:
    """`parameters` are of the section `training`."""
    training = TrainingConfig.model_validate(_DEFAULTS | parameters)
    return Trainer(model, training, seed=seed, reference=reference)


def batch_of_groups(num_groups: int = 4, group_size: int = 2, *, seed: int = 0) -> list[Sample]:
    """Samples of rollouts by another policy, each with some masked tokens."""
    random = np.random.default_rng(seed)

    def one(group: int) -> Sample:
        length = int(random.integers(2, 7))
        mask = (random.random(length) < 0.8).astype(np.uint8)
        mask[0] = 1
        return make_sample(
            random.integers(1, 12, 3),
            random.integers(1, 12, length),
            rollout_logprobs=-3 * random.random(length, dtype=np.float32),
            loss_mask=mask,
            temperature=float(random.choice([0.7, 1.0])),
            advantage=float(random.normal()),
            staleness=1,
            group=group,
        )

    return [one(group) for group in range(num_groups) for _ in range(group_size)]


def carrying_logprobs(model: PreTrainedModel, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """[L] log π and [L] entropy at the trained tokens of `sample`, by transformers' own attention."""
    logprobs_RV = response_logprobs(model, sample)
    carries_R = torch.from_numpy(sample.loss_mask).bool()
    entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(dim=-1)
    return taken(logprobs_RV, sample)[carries_R], entropy_R[carries_R]
