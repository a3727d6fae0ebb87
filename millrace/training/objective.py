"""What an optimizer update minimises: the tokens' losses, the policy's distance from the reference, its certainty.

    Σ over all tokens of the update that carry loss:   scale · (loss + β · KL to the reference − c · entropy)

A token's scale follows from the lengths of all the update's samples. So each microbatch, and each rank, adds its own
tokens' share, and the gradient is the same however the samples are split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from configs.training import TrainingConfig
from millrace.training.batch import Microbatch, Sample
from millrace.training.losses.aggregation import token_scale
from millrace.training.losses.base import LossTokens, TokenLosses, check_finite
from millrace.training.losses.factory import make_loss
from millrace.training.losses.kl import kl_penalty
from millrace.training.losses.left_out import loss_without, not_finite, on_policy
from millrace.training.losses.mismatch import masked_responses
from millrace.training.policy import TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class FixedLogprobs:
    """log π of a batch's N response tokens under policies that no update on the batch changes, nats."""

    reference_N: torch.Tensor | None
    """[N] float64, of the reference policy; None if there is none."""
    before_N: torch.Tensor | None
    """[N] float64, of the policy before the batch's first update; None if the batch takes only one."""


class Judged(NamedTuple):
    """What the objective says of the L tokens of a microbatch that carry loss."""

    losses: TokenLosses
    kl_L: torch.Tensor
    """[L] the estimate of the KL to the reference, nats, with gradient; 0 without a reference."""
    non_finite_L: torch.Tensor | None
    """[L] bool: masked because something was not finite; None if that is refused."""


class Objective:
    """The loss, masks, aggregation and KL penalty that `training` names.

    `max_new_tokens` is the maximum length of a response, which the aggregation `constant` reads. `loss` may be replaced
    between steps.
    """

    def __init__(self, training: TrainingConfig, max_new_tokens: int) -> None:
        self.loss = make_loss(training)
        self.kl = training.kl
        self._masks = training.masks
        self._refuses = training.non_finite == "refuse"
        self.entropy_coefficient = training.entropy_coefficient
        self._pulls_without_advantage = training.pulls_without_advantage
        self._aggregation = training.aggregation
        self._max_new_tokens = max_new_tokens

    def scale(self, samples: Sequence[Sample], places: Sequence[int]) -> torch.Tensor:
        """[samples] float64 factor of each token's loss in an update on those at `places`, and 0 for the others.

        Raises InputError if no token of the update carries loss.
        """
        lengths_U = torch.tensor([int(samples[place].loss_mask.sum()) for place in places])
        scale_Q = torch.zeros(len(samples), dtype=torch.float64)
        groups_U = torch.tensor([samples[place].group for place in places])
        scale_Q[list(places)] = token_scale(self._aggregation, lengths_U, self._max_new_tokens, groups_U)
        return scale_Q

    def pulls(self, sample: Sample) -> bool:
        """Whether `sample` adds to the gradient."""
        # The loss may have been replaced since.
        always = self._pulls_without_advantage or not self.loss.needs_advantage
        return bool(sample.loss_mask.any()) and (sample.advantage != 0 or always)

    def judge(self, batch: Microbatch, found: TokenLogprobs, fixed: FixedLogprobs) -> Judged:
        """The loss and the KL to the reference of the tokens of `batch` that carry loss.

        `fixed` is of the whole batch. Raises TrainingDiverged where a log-probability or an advantage is not finite,
        unless such tokens are masked.
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
        reference_L = None if fixed.reference_N is None else fixed.reference_N[at_L].to(trainer_logprobs_N)
        dropped_L = masked_responses(self._masks, tokens)
        if self._refuses:
            check_finite(tokens)
            return Judged(loss_without(self.loss, tokens, dropped_L), self._kl(tokens, reference_L), None)
        with torch.no_grad():
            losses = loss_without(self.loss, tokens, dropped_L)
            bad_L = not_finite(losses, self._kl(tokens, reference_L), tokens)
        kept_L = on_policy(tokens, bad_L)
        reference_L = None if reference_L is None else reference_L.masked_fill(bad_L, 0)
        dropped_L = bad_L if dropped_L is None else bad_L | dropped_L
        return Judged(loss_without(self.loss, tokens, dropped_L), self._kl(kept_L, reference_L), bad_L)

    def value(self, judged: Judged, entropy_L: torch.Tensor) -> torch.Tensor:
        """[L] what is minimised of each token that carries loss, before its scale; with gradient."""
        value_L = judged.losses.loss + self.kl.coefficient * judged.kl_L
        if not self.entropy_coefficient:
            return value_L
        if judged.non_finite_L is not None:
            entropy_L = entropy_L.masked_fill(judged.non_finite_L, 0)
        return value_L - self.entropy_coefficient * entropy_L

    def _kl(self, tokens: LossTokens, reference_L: torch.Tensor | None) -> torch.Tensor:
        if reference_L is None:
            return torch.zeros_like(tokens.rollout_logprobs_N)
        return kl_penalty(self.kl, tokens, reference_L)
