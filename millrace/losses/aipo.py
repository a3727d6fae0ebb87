"""AIPO: asynchronous importance-weighted policy optimisation (LlamaRL, arXiv 2505.24034).

    ∇J = Σ_tokens  min(π/μ, ρ) · A · ∇ log π

π is the policy being trained, μ the behaviour policy that sampled the token, A the advantage of its response. The
importance ratio is clipped from above only, and outside the gradient: a token whose ratio exceeds ρ keeps pulling with
weight ρ, where `-clamp(ratio, max=ρ)·A` would let go of it.
"""

import torch


def aipo_loss(
    trainer_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    max_importance_ratio: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The surrogate loss of each token, and its importance ratio.

    All tensors have one shape. `trainer_logprobs` are log π in nats, with gradient; `rollout_logprobs` are log μ;
    `advantages` repeat their response's value; `max_importance_ratio` is ρ. Returns (loss, π/μ unclipped), the ratio
    without gradient.
    """
    importance_ratio = (trainer_logprobs.detach() - rollout_logprobs).exp()
    weight = importance_ratio.clamp(max=max_importance_ratio)
    return -(weight * advantages * trainer_logprobs), importance_ratio
