"""The objective of an optimizer update: the tokens' losses, the KL to the reference, and the entropy.

    Σ over all trainable tokens of the update:   scale · (loss + β · KL to the reference − c · entropy)

A token's scale is its `training.aggregation` over the samples of its source, times the source's share of the update's
groups. It follows from the lengths of all the update's samples, so the gradient is the same however they are split into
microbatches and over ranks. Of a source with Q responses:

    token_mean      1 / Σ L             every token counts the same                         (DAPO, arXiv 2503.14476)
    sequence_mean   1 / (Q⁺ · L_q)      every response counts the same, however long        (GRPO, arXiv 2402.03300)
    prompt_mean     1 / (G⁺ · Σ_g L)    every prompt counts the same, and in it every token (ScaleRL, arXiv 2510.13786)
    constant        1 / (Q · T)         no length has an influence                          (Dr. GRPO, arXiv 2503.20783)

L_q: trainable tokens of response q; Q⁺: responses with such a token; Σ_g L: such tokens in the group of responses to a
prompt; G⁺: groups with such a token; T: the maximum length of the response.

So the loss is the sum of the sources' own losses, weighted with the shares of their groups (G⁺ of the source ÷ G⁺ of
the update), as in the multi-task objective of MT-GRPO (arXiv 2602.05547): the mixture's weights alone decide how much a
source counts. prime-rl (559b447) and NeMo-RL (7ea279a) divide by the tokens of all environments; there a source whose
responses are ten times longer than another's weighs ten times as much per group. With `prompt_mean`, or `sequence_mean`
and groups of one size, the result is the same as over all samples at once.

The KL is Schulman's estimate from sampled tokens, δ = log π − log π_ref, tokens sampled by π or by a policy close to it
(joschu.net/blog/kl-approx.html, 2020; k3 is GRPO's, eq. 4):

             value            gradient, times ∇ log π     mean over samples of π
    k1       δ                1                           value exact; gradient 0: it holds nothing near anything
    k2       δ² / 2           δ                           value biased; gradient that of KL(π‖π_ref)
    k3       e^(−δ) − 1 + δ   1 − e^(−δ)                  value exact, never negative; gradient that of KL(π_ref‖π)

It is not weighted by π/μ: on stale rollouts it is off by as much as μ is from π. With `importance_weighted` the value
is r · k, for r = π/μ and an estimate k above, and the factor of its gradient r · (k + the factor above): that of the
mean value, on samples of μ too. This is DeepSeek-V3.2's (arXiv 2512.02556) and TRL's `use_bias_correction_kl`.

With a teacher (`training.distillation`) the advantage of a token is that of its response, plus a coefficient times
log π_T − log π, without gradient. The loss weighs it as any advantage. For a loss that weighs with r, unbounded, the
mean of the second term's gradient over samples of μ is that of −KL(π‖π_T) at the token: on-policy distillation (arXiv
2306.13649; Thinking Machines, "On-Policy Distillation", 2025). The teacher computes at the temperature, and among the
tokens, that μ sampled from.

With `training.distillation.top_k` the forward KL to the teacher (`losses.forward_kl`), times a coefficient, is added.
It is a function of the two distributions, so it needs no weight π/μ.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from configs.losses import KlConfig, KlEstimator
from configs.sources import naming_source
from configs.training import ObjectiveConfig, TrainingConfig
from millrace.errors import InputError
from millrace.training.batch import Microbatch, Sample
from millrace.training.losses import excluded
from millrace.training.losses.base import LossInputs, LossOutputs
from millrace.training.losses.factory import Loss, make_loss


class Objectives:
    """The objective of each source: its own where it differs from the run's, and the run's for the others."""

    def __init__(self, training: TrainingConfig, trainings: Mapping[str, TrainingConfig]) -> None:
        """`training` is the run's, and `trainings` are those of sources by name."""
        self.of_run = Objective(training)
        self._own: dict[str, Objective] = {}
        for name, own in trainings.items():
            if any(getattr(own, key) != getattr(training, key) for key in ObjectiveConfig.model_fields):
                with naming_source(name):
                    self._own[name] = Objective(own)

    def of(self, sample: Sample) -> "Objective":
        """The objective of the sample's source."""
        return self._own.get(sample.source, self.of_run)

    def set_loss(self, loss: Loss) -> None:
        """Uses another loss for all sources; the rest of their objectives stays."""
        for objective in (self.of_run, *self._own.values()):
            objective.loss = loss

    def split(self, samples: Sequence[Sample], indices: Sequence[int]) -> Iterator[tuple["Objective", list[int]]]:
        """Splits `indices` of samples by objective."""
        for objective in (self.of_run, *self._own.values()):
            if of_objective := [index for index in indices if self.of(samples[index]) is objective]:
                yield objective, of_objective

    def scale(self, samples: Sequence[Sample], indices: Sequence[int]) -> torch.Tensor:
        """[samples] float64 factor of each token's loss in an update on those at `indices`, and 0 for the others.

        Raises InputError if no token of the update is trainable.
        """
        trainable = {samples[index].group for index in indices if np.count_nonzero(samples[index].loss_mask)}
        if not trainable:
            raise InputError(f"none of the batch's {len(indices)} responses has a trainable token")
        scale_Q = torch.zeros(len(samples), dtype=torch.float64)
        for source in {samples[index].source for index in indices}:
            of_source = [index for index in indices if samples[index].source == source]
            share = len(trainable & {samples[index].group for index in of_source}) / len(trainable)
            scale_Q[of_source] = share * token_scale(
                self.of(samples[of_source[0]]).aggregation,
                torch.tensor([np.count_nonzero(samples[index].loss_mask) for index in of_source]),
                torch.tensor([samples[index].max_new_tokens for index in of_source]),
                torch.tensor([samples[index].group for index in of_source]),
            )
        return scale_Q


class Objective:
    """The loss, masks, aggregation and KL penalty that `training` names. `loss` may be replaced between steps."""

    def __init__(self, training: TrainingConfig) -> None:
        self.loss = make_loss(training)
        self.aggregation = training.aggregation
        self._training = training

    def has_gradient(self, sample: Sample) -> bool:
        """Whether `sample` adds to the gradient."""
        always = self._training.pulls_without_advantage or not self.loss.needs_advantage
        # Counting is five times as fast as any().
        return (sample.advantage != 0 or always) and bool(np.count_nonzero(sample.loss_mask))

    def compute(
        self,
        batch: Microbatch,
        logprobs_N: torch.Tensor,
        before_N: torch.Tensor | None,
        reference_N: torch.Tensor | None,
    ) -> LossOutputs:
        """Computes the loss and the KL to the reference of the trainable tokens of `batch`.

        `logprobs_N` is log π of all its response tokens. Of all response tokens of the whole batch, `before_N` is
        log π before the first update, None if the batch takes only one, and `reference_N` that of the reference policy.
        Raises TrainingDiverged where a log-probability or an advantage is not finite, unless such tokens are masked.
        """
        at_L, kl = batch.in_batch_N[batch.trainable_L], self._training.kl
        if not kl.coefficient:
            # The reference is for other sources. Here an estimate that overflows would be multiplied by 0.
            reference_N = None
        advantages_L, distillation = batch.advantages_N[batch.trainable_L], self._training.distillation
        if distillation.teacher is not None:
            gained_N = batch.teacher_logprobs_N.to(logprobs_N) - logprobs_N.detach()
            advantages_L = advantages_L + distillation.coefficient * gained_N[batch.trainable_L]
        inputs = LossInputs(
            trainer_logprobs_N=logprobs_N[batch.trainable_L],
            rollout_logprobs_N=batch.rollout_logprobs_N[batch.trainable_L],
            advantages_N=advantages_L,
            response_N=batch.response_N[batch.trainable_L],
            num_responses=len(batch.indices),
            staleness_N=batch.staleness_N[batch.trainable_L],
            before_logprobs_N=None if before_N is None else before_N[at_L].to(logprobs_N),
            reference_logprobs_N=None if reference_N is None else reference_N[at_L].to(logprobs_N),
        )
        dropped_L = excluded.masked_responses(self._training.masks, inputs)
        if self._training.non_finite == "refuse":
            excluded.check_finite(inputs)
            return excluded.compute_without(self.loss, inputs, dropped_L)._replace(kl=kl_penalty(kl, inputs))
        with torch.no_grad():
            bad_L = excluded.not_finite(
                excluded.compute_without(self.loss, inputs, dropped_L), kl_penalty(kl, inputs), inputs
            )
        kl_L = kl_penalty(kl, excluded.replace_dropped(inputs, bad_L))
        dropped_L = bad_L if dropped_L is None else bad_L | dropped_L
        return excluded.compute_without(self.loss, inputs, dropped_L)._replace(kl=kl_L, non_finite=bad_L)

    def value(
        self, outputs: LossOutputs, entropy_L: torch.Tensor, forward_kl_L: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[L] the value to minimize of each trainable token, before its scale; with gradient.

        `forward_kl_L` is the KL(π_T‖π) of each; None without `training.distillation.top_k`.
        """
        assert outputs.kl is not None
        value_L = outputs.loss + self._training.kl.coefficient * outputs.kl
        terms = [(-self._training.entropy_coefficient, entropy_L)]
        if forward_kl_L is not None:
            terms.append((self._training.distillation.forward_coefficient, forward_kl_L))
        for coefficient, term_L in terms:
            if coefficient:
                if outputs.non_finite is not None:
                    term_L = term_L.masked_fill(outputs.non_finite, 0)
                value_L = value_L + coefficient * term_L
        return value_L


def token_scale(
    aggregation: str, lengths_Q: torch.Tensor, max_lengths_Q: torch.Tensor, groups_Q: torch.Tensor
) -> torch.Tensor:
    """[Q] float64 factor of each token's loss, per response of a source; 0 for a response without trainable tokens.

    `lengths_Q`, `max_lengths_Q` and `groups_Q` are [Q] int64, Q at least 1: the number of trainable tokens of each
    response, its maximum length, and the number of its group, from 0.
    """
    lengths_Q = lengths_Q.double()
    has_tokens_Q = lengths_Q > 0
    match aggregation:
        case "token_mean":
            scale_Q = (1 / lengths_Q.sum()).expand_as(lengths_Q)
        case "sequence_mean":
            scale_Q = 1 / (has_tokens_Q.sum() * lengths_Q)
        case "prompt_mean":
            tokens_G = torch.zeros(int(groups_Q.max()) + 1, dtype=torch.float64).index_add_(0, groups_Q, lengths_Q)
            scale_Q = 1 / ((tokens_G > 0).sum() * tokens_G[groups_Q])
        case "constant":
            scale_Q = 1 / (len(lengths_Q) * max_lengths_Q.double())
        case _:
            raise ValueError(f"unknown aggregation {aggregation!r}")
    return scale_Q.where(has_tokens_Q, 0)


def kl_to_reference(
    estimator: KlEstimator, trainer_logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor
) -> torch.Tensor:
    """[N] estimate of KL(π‖π_ref) at each token, nats, with its gradient; k3 is infinite where it overflows."""
    delta_N = trainer_logprobs_N - ref_logprobs_N.detach()
    if estimator == "k1":
        return delta_N
    if estimator == "k2":
        return delta_N**2 / 2
    return torch.expm1(-delta_N) + delta_N


def kl_penalty(kl: KlConfig, inputs: LossInputs) -> torch.Tensor:
    """[N] the penalty of each token at a coefficient of 1, nats, with its gradient; 0 without a reference.

    It is infinite where an estimate or a ratio overflows.
    """
    if inputs.reference_logprobs_N is None:
        return torch.zeros_like(inputs.rollout_logprobs_N)
    kl_N = kl_to_reference(kl.estimator, inputs.trainer_logprobs_N, inputs.reference_logprobs_N)
    if kl.importance_weighted:
        ratio_N = (inputs.trainer_logprobs_N - inputs.rollout_logprobs_N.detach()).exp()
        kl_N = ratio_N * kl_N
    return kl_N
