"""Tokens that a loss leaves out: it is computed as if they were on policy and without advantage.

    tokens ─► masks, finite? ─► dropped ─┬─► the loss of the others ─► 0 at those dropped
                                         └─► counted: `clipped`, and `non_finite_tokens` among a step's measures

A token is replaced before the loss is computed. To set its loss to 0 afterwards would not do: the gradient is then 0
times an infinite weight, which is NaN. It stays in the denominators of the batch, which follow from lengths alone.
"""

from dataclasses import replace

import torch

from millrace.training.losses.base import Loss, LossTokens, TokenLosses, importance_ratio


def loss_without(loss: Loss, tokens: LossTokens, dropped_N: torch.Tensor | None) -> TokenLosses:
    """The loss where the tokens `dropped_N`, [N] bool, have weight, loss and gradient 0; None: none is dropped.

    The ratio of a whole response is that of its other tokens. The importance ratio of a dropped token is reported too,
    if it is finite, else 1.
    """
    if dropped_N is None:
        return loss(tokens)
    found = loss(on_policy(tokens, dropped_N))
    ratio_N = importance_ratio(tokens)
    return TokenLosses(
        loss=found.loss.masked_fill(dropped_N, 0),
        weight=found.weight.masked_fill(dropped_N, 0),
        importance_ratio=ratio_N.where(~dropped_N | ratio_N.isfinite(), 1),
        clipped=found.clipped | dropped_N,
    )


@torch.no_grad()
def not_finite(losses: TokenLosses, kl_N: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
    """[N] bool: where the loss of a token, its weight, its KL or what these are made of is not finite."""
    columns = (
        losses.loss,
        losses.weight,
        kl_N,
        tokens.trainer_logprobs_N,
        tokens.rollout_logprobs_N,
        tokens.advantages_N,
    )
    return ~torch.stack([values_N.isfinite() for values_N in columns]).all(dim=0)


def on_policy(tokens: LossTokens, dropped_N: torch.Tensor) -> LossTokens:
    """The tokens, of which those dropped have no advantage, no gradient, and log π = log μ = 0."""
    before_N = tokens.before_logprobs_N
    return replace(
        tokens,
        # `where` passes no gradient to what it leaves out, whatever that is.
        trainer_logprobs_N=torch.where(dropped_N, 0, tokens.trainer_logprobs_N),
        rollout_logprobs_N=torch.where(dropped_N, 0, tokens.rollout_logprobs_N),
        before_logprobs_N=None if before_N is None else torch.where(dropped_N, 0, before_N),
        advantages_N=torch.where(dropped_N, 0, tokens.advantages_N),
    )
