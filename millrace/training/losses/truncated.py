"""Importance weights, clipped from above: one formula with three sources of the bound.

    −∇ loss = min(π/μ, bound) · A · ∇ log π

The bound applies outside the gradient: a token whose ratio exceeds it keeps pulling with that weight, where
`-clamp(ratio, max=bound)·A` would let go of it. So no token weighs more than the bound.
"""

from millrace.training.losses.base import Loss, LossTokens, TokenLosses, weighted_up_to


class Aipo(Loss):
    """AIPO: asynchronous importance-weighted policy optimisation (LlamaRL, arXiv 2505.24034); the bound is ρ."""

    name = "aipo"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        return weighted_up_to(self.training.max_importance_ratio, tokens)


class Tis(Loss):
    """TIS: truncated importance sampling; the bound is C.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (fengyao.notion.site/off-policy-rl, 2025); truncation: Ionides 2008. The source puts min(π_old/μ, C) in front of
    PPO's clipped objective, whose ratio is π/π_old. Where a batch takes one update, π_old is π and that ratio is 1;
    with several, nothing here clips what they do together.
    """

    name = "tis"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        return weighted_up_to(self.training.losses.tis.max_importance_ratio, tokens)


class Cispo(Loss):
    """CISPO: clipped importance-sampling policy optimisation (MiniMax-M1, arXiv 2506.13585); the bound is 1 + ε_high.

    ε_high is the one that `ppo_clip` has. The paper's lower bound is left out: the paper sets it so low that it never
    acts. The paper also divides advantages by their group's standard deviation; that is the advantage `grpo`.
    """

    name = "cispo"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        return weighted_up_to(1 + self.training.clip_high, tokens)
