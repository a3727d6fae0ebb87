"""log π of given tokens from hidden states, without the whole matrix of logits.

    hidden [N, H] ─► a chunk of tokens ─► logits [chunk, V] ─► log-softmax ─► log π of the target, entropy
                         ▲                                                              │ only these are kept
                         └──────── backward: the chunk's logits again ◄─────────────────┘

For a batch of 32 k tokens and a vocabulary of 128 k the whole matrix takes 16 GiB in float32, and its softmax and its
gradient take as much again. Here all three exist for one chunk at a time. That costs a third more work in the output
layer (cf. Cut Cross-Entropy, arXiv 2411.09009). Where truncated sampling (top-p) drew a token from few of the
vocabulary, π is renormalised over the same tokens as μ: the logits of all others are masked before the softmax.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Default maximum number of logits at a time, by kind of device: as few as keep it busy."""


class KeptTokens(NamedTuple):
    """The tokens that truncated sampling could draw, per response token."""

    tokens_K: torch.Tensor
    """[K] int64 token ids: those of the first token, then those of the second, …; no id twice for one token."""
    counts_N: torch.Tensor
    """[N] int64, how many of them belong to each token, K in all; 0 stands for the whole vocabulary."""
    sizes_N: npt.NDArray[np.int64]
    """`counts_N`, readable without waiting for a device."""

    def to(self, device: torch.device) -> "KeptTokens":
        """A copy with the tensors on `device`."""
        return KeptTokens(self.tokens_K.to(device), self.counts_N.to(device), self.sizes_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitScale:
    """Scale and cap of a model's logits, from the output layer's results x: cap · tanh(x / (divisor · cap))."""

    divisor: float = 1.0
    cap: float | None = None
    """None: the logits are x / divisor."""

    def apply_(self, raw_CV: torch.Tensor) -> torch.Tensor:
        """The logits, computed in place."""
        if self.divisor != 1:
            raw_CV = raw_CV.div_(self.divisor)
        return raw_CV if self.cap is None else raw_CV.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits_CV: torch.Tensor) -> torch.Tensor | float:
        """d logits / dx, from the logits."""
        # d cap · tanh(y / cap) / dy = 1 − tanh²
        return (1.0 if self.cap is None else 1 - (logits_CV / self.cap).square_()) / self.divisor


_UNSCALED = LogitScale()


def chunked_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    *,
    scale: LogitScale = _UNSCALED,
    kept: KeptTokens | None = None,
    chunk: int | None = None,
    each_chunk: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log π of each target and [N] entropy of π there, nats, both with gradient.

    π is the softmax of logits / temperature over the tokens in `kept`, or over the whole vocabulary; `scale` makes the
    logits of hidden · weightᵀ + bias. A target is one of its kept tokens. Both results are float32, or float64 if the
    hidden states are; so are the softmax and the sum of the weight's gradient over chunks. `targets_N` is int64;
    `chunk` is the number of tokens per chunk, and `each_chunk` is called after each one of either pass.
    """
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS[hidden_NH.device.type] // len(weight_VH))
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, kept, scale, chunk, each_chunk
    )
    return logprobs_N, entropy_N


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        kept: KeptTokens | None,
        scale: LogitScale,
        chunk: int,
        each_chunk: Callable[[], None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=_wide(hidden_NH))
        entropy_N = torch.empty_like(logprobs_N)
        factor_VH = _factor(weight_VH)
        for part, kept_C in _chunks(len(hidden_NH), chunk, kept):
            logits_CV = scale.apply_(output_logits(hidden_NH[part], factor_VH, bias_V))
            logits_CV = _tempered(logits_CV, temperatures_N[part], kept_C)
            log_sum_C = logits_CV.logsumexp(dim=-1)
            logprobs_N[part] = logits_CV.gather(1, targets_N[part, None]).squeeze(1) - log_sum_C
            probs_CV = logits_CV.softmax(dim=-1)
            entropy_N[part] = log_sum_C - torch.linalg.vecdot(probs_CV, logits_CV)
            # Else they would stay while the next chunk's are made.
            del logits_CV, probs_CV
            each_chunk()
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N)
        ctx.kept, ctx.scale, ctx.chunk, ctx.each_chunk = kept, scale, chunk, each_chunk
        # An entropy that nothing uses costs the backward pass nothing.
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        wide = _wide(hidden_NH)
        if grad_N is None:
            grad_N = torch.zeros_like(targets_N, dtype=wide)
        grad_hidden_NH = torch.empty_like(hidden_NH) if for_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if for_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if for_bias else None
        factor_VH = _factor(weight_VH)
        for part, kept_C in _chunks(len(hidden_NH), ctx.chunk, ctx.kept):
            logits_CV = ctx.scale.apply_(output_logits(hidden_NH[part], factor_VH, bias_V))
            slope = ctx.scale.slope(logits_CV)
            logits_CV = _tempered(logits_CV, temperatures_N[part], kept_C)
            probs_CV = logits_CV.softmax(dim=-1)
            from_entropy_CV = None if grad_entropy_N is None else _entropy_gradient(logits_CV, probs_CV)
            # d log π(target) / d logits = (1 at the target − π) / temperature
            pull_C1 = (grad_N[part] / temperatures_N[part])[:, None]
            grad_CV = probs_CV.mul_(-pull_C1).scatter_add_(1, targets_N[part, None], pull_C1)
            if grad_entropy_N is not None and from_entropy_CV is not None:
                grad_CV += from_entropy_CV.mul_((grad_entropy_N[part] / temperatures_N[part])[:, None])
            if isinstance(slope, torch.Tensor) or slope != 1:
                grad_CV = grad_CV.mul_(slope)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(hidden_NH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[part] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                if grad_CV.is_cuda and grad_CV.dtype != wide:
                    # Sums 16-bit products in float32; elsewhere the factors are widened first.
                    torch.addmm(grad_weight_VH, grad_CV.t(), hidden_NH[part], out_dtype=wide, out=grad_weight_VH)
                else:
                    grad_weight_VH.addmm_(grad_CV.t().to(wide), hidden_NH[part].to(wide))
            del logits_CV, slope, probs_CV, from_entropy_CV, grad_CV
            ctx.each_chunk()
        return (
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            *[None] * 6,
        )


def _chunks(size: int, chunk: int, kept: KeptTokens | None) -> Iterator[tuple[slice, KeptTokens | None]]:
    """The slice of each chunk of tokens, and what these were drawn from."""
    parts = [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]
    if kept is None:
        yield from ((part, None) for part in parts)
        return
    sizes = [int(kept.sizes_N[part].sum()) for part in parts]
    for part, tokens in zip(parts, torch.split(kept.tokens_K, sizes), strict=True):
        yield part, KeptTokens(tokens, kept.counts_N[part], kept.sizes_N[part])


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def output_logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    """[C, V] logits of the output layer, float32 or float64, never rounded to 16 bits; without gradient."""
    wide = _wide(hidden_CH)
    if hidden_CH.is_cuda and hidden_CH.dtype != wide:
        # Sums 16-bit products in float32, and keeps the sums.
        logits_CV = torch.mm(hidden_CH, weight_VH.t(), out_dtype=wide)
        return logits_CV if bias_V is None else logits_CV.add_(bias_V)
    return torch.nn.functional.linear(
        hidden_CH.to(wide), weight_VH.to(wide), None if bias_V is None else bias_V.to(wide)
    )


def _factor(weight_VH: torch.Tensor) -> torch.Tensor:
    """The weight as `output_logits` multiplies it: only CUDA multiplies 16-bit numbers to float32."""
    return weight_VH if weight_VH.is_cuda else weight_VH.to(_wide(weight_VH))


def _tempered(logits_CV: torch.Tensor, temperatures_C: torch.Tensor, kept: KeptTokens | None) -> torch.Tensor:
    """[C, V] at the temperature, in place; the lowest number for tokens that are not kept."""
    logits_CV = logits_CV.div_(temperatures_C[:, None])
    if kept is None:
        return logits_CV
    dropped_CV = (kept.counts_N > 0)[:, None].repeat(1, logits_CV.shape[1])
    rows_C = torch.arange(len(dropped_CV), device=dropped_CV.device)
    # With its size a device need not be waited for.
    rows_K = rows_C.repeat_interleave(kept.counts_N, output_size=len(kept.tokens_K))
    dropped_CV[rows_K, kept.tokens_K] = False
    # Its probability is 0 next to any kept one. Minus infinity would make an entropy of 0 · ∞.
    return logits_CV.masked_fill_(dropped_CV, torch.finfo(logits_CV.dtype).min)


def _entropy_gradient(logits_CV: torch.Tensor, probs_CV: torch.Tensor) -> torch.Tensor:
    """[C, V] d entropy / d logits = −π (log π + entropy), of logits at the temperature."""
    # In place of the logits; a token that was not kept has a probability of 0, and a finite log π.
    log_probs_CV = logits_CV.sub_(logits_CV.logsumexp(dim=-1, keepdim=True))
    entropy_C1 = -torch.linalg.vecdot(probs_CV, log_probs_CV)[:, None]
    return log_probs_CV.add_(entropy_C1).mul_(probs_CV).neg_()
