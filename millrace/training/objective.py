"""What an optimizer step minimises: the tokens' losses, and the policy's distance from the reference policy.

    Σ over all tokens of the batch that carry loss:   scale · (loss + β · KL to the reference)

A token's scale follows from the lengths of the whole batch. So each microbatch, and each rank, adds its own tokens'
share, and the gradient is the same however the batch is split.
"""

from collections.abc import Sequence

import torch

from configs.training import TrainingConfig
from millrace.training.batch import Microbatch, Sample
from millrace.training.losses.aggregation import token_scale
from millrace.training.losses.base import LossTokens, TokenLosses, check_finite
from millrace.training.losses.factory import make_loss
from millrace.training.losses.kl import kl_to_reference


class Objective:
    """The loss, aggregation and KL penalty that `training` names.

    `max_new_tokens` is the maximum length of a response, which the aggregation `constant` reads. `loss` may be replaced
    between steps.
    """

    def __init__(self, training: TrainingConfig, max_new_tokens: int) -> None:
        self.loss = make_loss(training)
        self.kl = training.kl
        self._balances = training.router_aux_loss_coefficient != 0
        self._aggregation = training.aggregation
        self._max_new_tokens = max_new_tokens

    def scale(self, samples: Sequence[Sample]) -> torch.Tensor:
        """[samples] float64 factor of each token's loss. Raises InputError if no token carries loss."""
        lengths_Q = torch.tensor([int(sample.loss_mask.sum()) for sample in samples])
        return token_scale(self._aggregation, lengths_Q, self._max_new_tokens)

    def pulls(self, sample: Sample) -> bool:
        """Whether `sample` adds to the gradient. Without an advantage, only a KL and the experts' balance do."""
        always = self.kl.coefficient != 0 or self._balances
        return bool(sample.loss_mask.any()) and (sample.advantage != 0 or always)

    def token_losses(
        self, batch: Microbatch, trainer_logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor | None
    ) -> tuple[TokenLosses, torch.Tensor]:
        """Losses of the tokens of `batch` that carry loss, and their KL to the reference, nats, both with gradient.

        The KL is 0 if `ref_logprobs_N` is None. Raises TrainingDiverged where something is not finite.
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
            kl_N = kl_to_reference(self.kl.estimator, tokens.trainer_logprobs_N, ref_logprobs_N[carries])
        return self.loss(tokens), kl_N
