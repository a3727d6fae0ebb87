"""Losses and advantages by import path, good ones and bad ones: `tests.support.training.own_functions:<name>`."""

from collections.abc import Sequence

import torch

from configs.training import TrainingConfig
from millrace.training.losses.base import LossInputs, LossOutputs, importance_ratio, weighted

NOT_A_FUNCTION = 1
BOUND = 1.1


def capped(tokens: LossInputs, training: TrainingConfig) -> LossOutputs:
    """The loss `aipo`, written by a user."""
    ratio_N = importance_ratio(tokens)
    return weighted(tokens, ratio_N.clamp(max=BOUND), ratio_N > BOUND)


def overflowing(tokens: LossInputs, training: TrainingConfig) -> LossOutputs:
    """The same, with an infinite weight where π is twice as likely as μ."""
    ratio_N = importance_ratio(tokens)
    return weighted(tokens, ratio_N.masked_fill(ratio_N > 2, float("inf")), ratio_N > 2)


def of_one(tokens: LossInputs) -> LossOutputs:
    raise AssertionError("never called")


def a_tensor(tokens: LossInputs, training: TrainingConfig) -> torch.Tensor:
    return -tokens.trainer_logprobs_N


def of_columns(tokens: LossInputs, training: TrainingConfig) -> LossOutputs:
    outputs = capped(tokens, training)
    return outputs._replace(weight=outputs.weight[:, None])


def of_numbers(tokens: LossInputs, training: TrainingConfig) -> LossOutputs:
    return capped(tokens, training)._replace(clipped=False)  # type: ignore[arg-type]


def without_gradient(tokens: LossInputs, training: TrainingConfig) -> LossOutputs:
    outputs = capped(tokens, training)
    return outputs._replace(loss=outputs.loss.detach())


def not_finite(tokens: LossInputs, training: TrainingConfig) -> LossOutputs:
    outputs = capped(tokens, training)
    return outputs._replace(loss=outputs.loss / 0)


def fails(tokens: LossInputs, training: TrainingConfig) -> LossOutputs:
    raise KeyError("beta\nand more")


def better_than_half(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[reward - 0.5 for reward in group] for group in rewards]


def one_group(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    return better_than_half(rewards)[:1]


def a_member_less(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    return [values[:-1] for values in better_than_half(rewards)]


def a_number(rewards: Sequence[Sequence[float]]) -> float:
    return 0.0


def of_text(rewards: Sequence[Sequence[float]]) -> list[list[str]]:
    return [["much" for _ in group] for group in rewards]


def infinite(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[float("inf") for _ in group] for group in rewards]


def divides(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[1 / sum(0 * reward for reward in group)] for group in rewards]
