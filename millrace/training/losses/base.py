"""Inputs and outputs of a policy-gradient loss, and the pieces that losses are made of.

    −∇ loss = weight · A · ∇ log π        weight: a function of π, of μ, and of the sign of A

π is the policy being trained, μ the behavior policy that sampled the token, r = π/μ the importance ratio, A the
advantage of the token. Losses differ only in the weight. A loss is a function of `LossInputs` and the config
section `training`, and returns `LossOutputs`; it keeps no state.

Shapes: N trainable tokens, response after response, each response whole, without padding. The ratio of a response is
over its trainable tokens.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The trainable tokens of a microbatch: what a loss gets, built in or your own.

    Examples:
        >>> def gentle(inputs, training):  # training: {loss: "my_losses:gentle"}
        ...     ratio_N = importance_ratio(inputs)
        ...     return weighted(inputs, ratio_N.clamp(max=4).sqrt(), ratio_N > 4)
        >>> log_pi, log_mu, one = (torch.tensor([value]) for value in (-1.0, -2.0, 1.0))
        >>> index = torch.tensor([0])
        >>> tokens = LossInputs(
        ...     trainer_logprobs_N=log_pi, rollout_logprobs_N=log_mu, advantages_N=one,
        ...     response_N=index, num_responses=1, staleness_N=index,
        ... )
        >>> round(gentle(tokens, None).weight.item(), 2)
        1.65
    """

    trainer_logprobs_N: torch.Tensor
    """[N] log π, nats, with gradient."""
    rollout_logprobs_N: torch.Tensor
    """[N] log μ, nats."""
    advantages_N: torch.Tensor
    """[N] of the token: that of its response, plus its teacher's term."""
    response_N: torch.Tensor
    """[N] int64, ascending: index of the token's response in the microbatch, from 0."""
    num_responses: int
    """Responses of the microbatch; a response may have no token here."""
    staleness_N: torch.Tensor
    """[N] int64: policy versions by which the trainer is ahead of the oldest one that sampled any of the response's
    tokens, without those too old to train on."""
    before_logprobs_N: torch.Tensor | None = None
    """[N] log π before the first update on the batch, nats, without gradient; None if this is the first."""
    reference_logprobs_N: torch.Tensor | None = None
    """[N] log π of the reference policy, nats, without gradient; None if there is none."""


class LossOutputs(NamedTuple):
    """Results of a loss, and of the objective; all tensors are [N]."""

    loss: torch.Tensor
    """Surrogate loss of each token; its gradient is the one to descend."""
    weight: torch.Tensor
    """Factor of the token's A · ∇ log π, without gradient."""
    importance_ratio: torch.Tensor
    """π/μ of the token before any clipping, without gradient."""
    clipped: torch.Tensor
    """bool: whether a bound changed the weight."""
    kl: torch.Tensor | None = None
    """Estimate of the KL to the reference, nats, with gradient; set by the objective, 0 without a reference."""
    non_finite: torch.Tensor | None = None
    """bool: masked because something was not finite; set by the objective, None if that is refused."""


def importance_ratio(inputs: LossInputs) -> torch.Tensor:
    """[N] r = π/μ of each token, without gradient; infinite where it overflows."""
    return (inputs.trainer_logprobs_N.detach() - inputs.rollout_logprobs_N.detach()).exp()


def log_ratios(inputs: LossInputs) -> torch.Tensor:
    """[N] float64 log r of each token, nats, without gradient."""
    return inputs.trainer_logprobs_N.detach().double() - inputs.rollout_logprobs_N.detach().double()


def response_ratio(inputs: LossInputs) -> torch.Tensor:
    """[N] float64 ρ = Π r over the token's response, without gradient."""
    return reduce_responses("sum", log_ratios(inputs), inputs).exp()


def mean_ratio(inputs: LossInputs) -> torch.Tensor:
    """[N] float64 s = ρ^(1/L), the geometric mean of r over the L tokens of the response, without gradient."""
    return mean_over_responses(log_ratios(inputs), inputs).exp()


def mean_over_responses(values_N: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[N] mean of the values in each token's response."""
    return reduce_responses("sum", values_N, inputs) / _lengths(inputs)[inputs.response_N]


def reduce_responses(reduce: Literal["sum", "min", "max"], values_N: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[N] sum, minimum or maximum of the values in each token's response."""
    # index_add adds in any order on a GPU, so a replay would not match bit for bit.
    # segment_reduce's checks fail without any responses, as in a spare rank's dummy batch.
    reduced_Q = torch.segment_reduce(values_N, reduce, lengths=_lengths(inputs), unsafe=True)
    return reduced_Q[inputs.response_N]


def _lengths(inputs: LossInputs) -> torch.Tensor:
    # bincount would make a GPU wait for the highest index.
    lengths_Q = torch.zeros(inputs.num_responses, dtype=torch.int64, device=inputs.response_N.device)
    return lengths_Q.index_add_(0, inputs.response_N, torch.ones_like(inputs.response_N))


def weighted(inputs: LossInputs, weight_N: torch.Tensor, clipped_N: torch.Tensor) -> LossOutputs:
    """The loss −weight · A · log π. No gradient flows through the weight, which has to be finite."""
    return LossOutputs(
        loss=-(weight_N * inputs.advantages_N * inputs.trainer_logprobs_N),
        weight=weight_N,
        importance_ratio=importance_ratio(inputs),
        clipped=clipped_N,
    )


def surrogate(
    inputs: LossInputs, objective_N: torch.Tensor, weight_N: torch.Tensor, clipped_N: torch.Tensor
) -> LossOutputs:
    """The loss −objective · A with gradient −weight · A · ∇ log π, for objectives that are functions of a ratio.

    A token without advantage has loss and gradient 0, even where its ratio is infinite. A token without weight has a
    finite loss too: where its objective overflows, the largest number replaces it.
    """
    no_advantage_N = inputs.advantages_N == 0
    value_N = (objective_N * inputs.advantages_N).masked_fill(no_advantage_N, 0)
    largest = torch.finfo(value_N.dtype).max
    value_N = torch.where(weight_N == 0, value_N.clamp(-largest, largest), value_N)
    slope_N = (weight_N * inputs.advantages_N).masked_fill(no_advantage_N, 0)
    return LossOutputs(
        loss=-value_N - slope_N * (inputs.trainer_logprobs_N - inputs.trainer_logprobs_N.detach()),
        weight=weight_N,
        importance_ratio=importance_ratio(inputs),
        clipped=clipped_N,
    )
