"""What an optimizer update minimises: the tokens' losses, the policy's distance from the reference, its certainty.

    Σ over all tokens of the update that carry loss:   scale · (loss + β · KL to the reference − c · entropy)

A token's scale follows from the lengths of all the update's samples. So each microbatch, and each rank, adds its own
tokens' share, and the gradient is the same however the samples are split.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.training import TrainingConfig
from millrace.training.batch import Microbatch, Sample
from millrace.training.losses.aggregation import token_scale
from millrace.training.losses.base import LossTokens, TokenLosses, check_finite
from millrace.training.losses.factory import make_loss
from millrace.training.losses.kl import kl_to_reference
from millrace.training.policy import TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class FixedLogprobs:
    """log π of a batch's N response tokens under policies that no update on the batch changes, nats."""

    reference_N: torch.Tensor | None
    """[N] float64, of the reference policy; None if there is none."""
    before_N: torch.Tensor | None
    """[N] float64, of the policy before the batch's first update; None if the batch takes only one."""


class Objective:
    """The loss, aggregation and KL penalty that `training` names.

    `max_new_tokens` is the maximum length of a response, which the aggregation `constant` reads. `loss` may be replaced
    between steps.
    """

    def __init__(self, training: TrainingConfig, max_new_tokens: int) -> None:
        self.loss = make_loss(training)
        self.kl = training.kl
        self.entropy_coefficient = training.entropy_coefficient
        self._balances = training.router_aux_loss_coefficient != 0
        self._aggregation = training.aggregation
        self._max_new_tokens = max_new_tokens

    def scale(self, samples: Sequence[Sample], places: Sequence[int]) -> torch.Tensor:
        """[samples] float64 factor of each token's loss in an update on those at `places`, and 0 for the others.

        Raises InputError if no token of the update carries loss.
        """
        lengths_U = torch.tensor([int(samples[place].loss_mask.sum()) for place in places])
        scale_Q = torch.zeros(len(samples), dtype=torch.float64)
        scale_Q[list(places)] = token_scale(self._aggregation, lengths_U, self._max_new_tokens)
        return scale_Q

    def pulls(self, sample: Sample) -> bool:
        """Whether `sample` adds to the gradient. Without an advantage, only KL, entropy and the experts' balance do."""
        always = self.kl.coefficient != 0 or self.entropy_coefficient != 0 or self._balances
        return bool(sample.loss_mask.any()) and (sample.advantage != 0 or always)

    def token_losses(
        self, batch: Microbatch, found: TokenLogprobs, fixed: FixedLogprobs
    ) -> tuple[TokenLosses, torch.Tensor]:
        """Losses of the L tokens of `batch` that carry loss, and [L] their KL to the reference, nats, with gradient.

        `fixed` is of the whole batch. The KL is 0 without a reference. Raises TrainingDiverged where something is not
        finite.
        """
        carries, trainer_logprobs_N = batch.carries_L, found.logprobs_N
        at_L = batch.in_batch_N[carries]
        tokens = LossTokens(
            trainer_logprobs_N=trainer_logprobs_N[carries],
            rollout_logprobs_N=batch.rollout_logprobs_N[carries],
            advantages_N=batch.advantages_N[carries],
            response_N=batch.response_N[carries],
            num_responses=len(batch.places),
            staleness_N=batch.staleness_N[carries],
            before_logprobs_N=None if fixed.before_N is None else fixed.before_N[at_L].to(trainer_logprobs_N),
        )
        check_finite(tokens)
        if fixed.reference_N is None:
            kl_N = torch.zeros_like(tokens.rollout_logprobs_N)
        else:
            reference_L = fixed.reference_N[at_L].to(trainer_logprobs_N)
            kl_N = kl_to_reference(self.kl.estimator, tokens.trainer_logprobs_N, reference_L)
        return self.loss(tokens), kl_N

    def value(self, losses: TokenLosses, kl_L: torch.Tensor, entropy_L: torch.Tensor) -> torch.Tensor:
        """[L] what is minimised of each token that carries loss, before its scale; with gradient."""
        value_L = losses.loss + self.kl.coefficient * kl_L
        return value_L - self.entropy_coefficient * entropy_L if self.entropy_coefficient else value_L
