"""Decoupled PPO: clip against a policy close to π, and correct from there to the one that sampled.

    loss = −(π_prox/μ) · min(r · A, clip(r, 1 − ε_low, 1 + ε_high) · A)        r = π/π_prox
    −∇ loss = (π/μ) · A · ∇ log π, or 0 where r is clipped

Hilton et al., arXiv 2110.00641; for asynchronous training of language models AReaL, arXiv 2505.24298, §5.2. The
proximal policy π_prox is one of

    recomputed      π_prox = π as it was before the batch's first update
    interpolated    log π_prox = log π + (log μ − log π) / d        d: staleness in versions; π_prox = π where d = 0

`recomputed` is AReaL's. With several updates on a batch (`training.minibatches`, `training.epochs`) it bounds how far
they move the policy together, however stale the batch is. In the first of them, and so where a batch takes only one, π
before it is π itself without gradient: r is 1, nothing is clipped, and a token weighs its full importance ratio.

`interpolated` is A-3PO (arXiv 2512.06547): a geometric mean of μ and π that puts π_prox about one version behind π. At
d = 1 it is μ, and the loss is `ppo_clip`. π is the live policy, in each update. A-3PO's d is the token's; here d is the
response's, counted from the oldest version that sampled any of it.

Neither bounds π/μ. AReaL's code drops tokens where it is large; `icepop` does that.
"""

import torch

from millrace.training.losses.base import Loss, LossTokens, TokenLosses, importance_ratio, surrogate
from millrace.training.losses.clipped import moved_far_enough


class DecoupledPpo(Loss):
    """Importance weights, and none for tokens that moved far enough from the proximal policy."""

    name = "decoupled_ppo"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        low, high = self.training.clip_low, self.training.clip_high
        trainer_logprobs_N = tokens.trainer_logprobs_N.detach()
        proximal_logprobs_N = self._proximal_logprobs(tokens)
        ratio_N = (trainer_logprobs_N - proximal_logprobs_N).exp()
        clipped_N = moved_far_enough(ratio_N, tokens.advantages_N, low, high)
        # Where nothing is clipped (π_prox/μ) · r is π/μ; computed as a product, either factor could overflow.
        weight_N = importance_ratio(tokens)
        correction_N = (proximal_logprobs_N - tokens.rollout_logprobs_N.detach()).exp()
        at_bound_N = correction_N * ratio_N.clamp(1 - low, 1 + high)
        objective_N = torch.where(clipped_N, at_bound_N, weight_N)
        return surrogate(tokens, objective_N, weight_N.masked_fill(clipped_N, 0), clipped_N)

    def _proximal_logprobs(self, tokens: LossTokens) -> torch.Tensor:
        """[N] log π_prox, nats, without gradient."""
        trainer_logprobs_N = tokens.trainer_logprobs_N.detach()
        if self.training.losses.decoupled_ppo.proximal == "recomputed":
            return trainer_logprobs_N if tokens.before_logprobs_N is None else tokens.before_logprobs_N
        staleness_N = tokens.staleness_N.to(trainer_logprobs_N)
        rollout_logprobs_N = tokens.rollout_logprobs_N.detach().to(trainer_logprobs_N)
        share_of_rollout_N = torch.where(staleness_N > 0, 1 / staleness_N, 0)
        return torch.lerp(trainer_logprobs_N, rollout_logprobs_N, share_of_rollout_N)
