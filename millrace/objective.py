"""What an optimizer step descends along: the tokens' losses, and how far the policy is from the reference policy.

    Σ over all tokens of the batch that carry loss:   scale · (loss + β · KL to the reference)

A token's scale follows from the lengths of the whole batch. So each microbatch, and each rank, adds its own tokens'
share, and the gradient is the same however the batch is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from millrace.batch import Microbatch, Sample
from millrace.losses.aggregation import token_scale
from millrace.losses.base import Loss, LossTokens, TokenLosses, check_finite
from millrace.losses.kl import KlEstimator, kl_to_reference


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss, and what becomes of its tokens' values."""

    loss: Loss
    max_new_tokens: int
    """The longest that a response may be, which the aggregation `constant` reads."""
    aggregation: str = "token_mean"
    """As `millrace.losses.aggregation` has them."""
    kl_coefficient: float = 0.0
    """β; where it is 0 there is no reference policy."""
    kl_estimator: KlEstimator = "k3"

    def scale(self, samples: Sequence[Sample]) -> torch.Tensor:
        """[samples] float64: by what each token of a response counts. Raises InputError where none carries loss."""
        lengths_Q = torch.tensor([int(sample.loss_mask.sum()) for sample in samples])
        return token_scale(self.aggregation, lengths_Q, self.max_new_tokens)

    def judge(
        self, batch: Microbatch, trainer_logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor | None
    ) -> tuple[TokenLosses, torch.Tensor]:
        """The loss of the tokens of `batch` that carry loss, and their KL to the reference, nats, both with gradient.

        The KL is 0 where `ref_logprobs_N` is None. Raises TrainingDiverged where something is not finite.
        """
        carries = batch.loss_mask_N
        tokens = LossTokens(
            trainer_logprobs_N=trainer_logprobs_N[carries],
            rollout_logprobs_N=batch.rollout_logprobs_N[carries],
            advantages_N=batch.advantages_N[carries],
            response_N=batch.response_N[carries],
            num_responses=len(batch.places),
            staleness_N=batch.staleness_N[carries],
        )
        check_finite(tokens)
        if ref_logprobs_N is None:
            kl_N = torch.zeros_like(tokens.rollout_logprobs_N)
        else:
            kl_N = kl_to_reference(self.kl_estimator, tokens.trainer_logprobs_N, ref_logprobs_N[carries])
        return self.loss(tokens), kl_N
