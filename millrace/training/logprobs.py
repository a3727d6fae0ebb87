"""log π of given tokens from hidden states, without the whole matrix of logits.

    hidden [N, H] ─► a chunk of tokens ─► logits [chunk, V] ─► log-softmax ─► log π of the target, entropy
                         ▲                                                              │ only these are kept
                         └──────── backward: the chunk's logits again ◄─────────────────┘
    a teacher's k likeliest tokens ─► KL(π_T‖π) over these, and all others as one, from the same chunk

For a batch of 32 k tokens and a vocabulary of 128 k the whole matrix takes 16 GiB in float32, and its softmax and its
gradient take as much again. Here all three exist for one chunk at a time. That costs a third more work in the output
layer (cf. Cut Cross-Entropy, arXiv 2411.09009). Where truncated sampling (top-p) drew a token from few of the
vocabulary, π is renormalised over the same tokens as μ: the logits of all others are masked before the softmax.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from millrace.training.losses.forward_kl import TopTokens, add_forward_kl_gradient, forward_kl

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

    def logits(self, raw_CV: torch.Tensor) -> torch.Tensor:
        """The logits; `raw_CV` itself if they are the same."""
        logits_CV = raw_CV if self.divisor == 1 else raw_CV / self.divisor
        return logits_CV if self.cap is None else (logits_CV / self.cap).tanh_() * self.cap

    def slope(self, logits_CV: torch.Tensor) -> torch.Tensor | float:
        """d logits / dx, from the logits."""
        # d cap · tanh(y / cap) / dy = 1 − tanh²
        return (1.0 if self.cap is None else 1 - (logits_CV / self.cap) ** 2) / self.divisor


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
    teacher_top: TopTokens | None = None,
    chunk: int | None = None,
    compiled: bool = False,
    each_chunk: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """[N] log π of each target, [N] entropy of π there, and [N] KL(π_T‖π) there, nats, all with gradient.

    π is the softmax of logits / temperature over the tokens in `kept`, or over the whole vocabulary; `scale` makes the
    logits of hidden · weightᵀ + bias. A target is one of its kept tokens. All results are float32, or float64 if the
    hidden states are; so are the softmax and the sum of the weight's gradient over chunks. `targets_N` is int64;
    `chunk` is the number of tokens per chunk, and `each_chunk` is called after each one of either pass. `compiled`:
    torch compiles what is computed per logit, so that a GPU reads each logit two or three times, and not a dozen.

    The KL is that of `millrace.training.losses.forward_kl`; None without `teacher_top`.
    """
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS[hidden_NH.device.type] // len(weight_VH))
    logprobs_N, entropy_N, kl_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, kept, teacher_top, scale, chunk, compiled, each_chunk
    )
    return logprobs_N, entropy_N, kl_N


@torch.no_grad()
def chunked_top(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    num_top: int,
    *,
    scale: LogitScale = _UNSCALED,
    kept: KeptTokens | None = None,
    chunk: int | None = None,
    each_chunk: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, TopTokens]:
    """[N] log π of each target, and the `num_top` likeliest tokens of π there, 0 or more; without gradient.

    Parameters and π are those of `chunked_logprobs`.
    """
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS[hidden_NH.device.type] // len(weight_VH))
    logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=_wide(hidden_NH))
    top_logprobs_NK = logprobs_N.new_empty(len(hidden_NH), num_top)
    top_tokens_NK = targets_N.new_empty(len(hidden_NH), num_top)
    for part, kept_C in _chunks(len(hidden_NH), chunk, kept):
        raw_CV = output_logits(hidden_NH[part], weight_VH, bias_V)
        logits_CV = _tempered(scale.logits(raw_CV), temperatures_N[part], _dropped(kept_C, raw_CV))
        log_sum_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
        logprobs_N[part] = (logits_CV.gather(1, targets_N[part, None]) - log_sum_C1).squeeze(1)
        top_CK, top_tokens_NK[part] = logits_CV.topk(num_top)
        top_logprobs_NK[part] = top_CK - log_sum_C1
        del raw_CV, logits_CV
        each_chunk()
    return logprobs_N, TopTokens(top_tokens_NK, top_logprobs_NK)


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
        top: TopTokens | None,
        scale: LogitScale,
        chunk: int,
        compiled: bool,
        each_chunk: Callable[[], None],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        measure = _compile(_measure) if compiled else _measure
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=_wide(hidden_NH))
        entropy_N, log_sum_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        kl_N, log_rest_N = (None, None) if top is None else (torch.empty_like(logprobs_N), torch.empty_like(logprobs_N))
        for part, kept_C in _chunks(len(hidden_NH), chunk, kept):
            raw_CV = output_logits(hidden_NH[part], weight_VH, bias_V)
            dropped_CV = _dropped(kept_C, raw_CV)
            logprobs_N[part], entropy_N[part], log_sum_N[part], *of_top = measure(
                raw_CV, dropped_CV, targets_N[part], temperatures_N[part], scale, top and top.at(part)
            )
            if kl_N is not None and log_rest_N is not None:
                kl_N[part], log_rest_N[part] = of_top
            # Else they would stay while the next chunk's are made.
            del raw_CV, dropped_CV
            each_chunk()
        of_forward = log_sum_N, entropy_N, log_rest_N
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, *of_forward)
        ctx.kept, ctx.top, ctx.scale, ctx.chunk = kept, top, scale, chunk
        ctx.compiled, ctx.each_chunk = compiled, each_chunk
        # An entropy that nothing uses costs the backward pass nothing.
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, kl_N

    @staticmethod
    def backward(
        ctx: Any,
        grad_N: torch.Tensor | None,
        grad_entropy_N: torch.Tensor | None,
        grad_kl_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, log_sum_N, entropy_N, log_rest_N = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        gradient = _compile(_gradient) if ctx.compiled else _gradient
        wide = _wide(hidden_NH)
        if grad_N is None:
            grad_N = torch.zeros_like(log_sum_N)
        grad_hidden_NH = torch.empty_like(hidden_NH) if for_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if for_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if for_bias else None
        for part, kept_C in _chunks(len(hidden_NH), ctx.chunk, ctx.kept):
            raw_CV = output_logits(hidden_NH[part], weight_VH, bias_V)
            grad_CV = gradient(
                raw_CV,
                _dropped(kept_C, raw_CV),
                targets_N[part],
                temperatures_N[part],
                ctx.scale,
                log_sum_N[part],
                grad_N[part],
                None if grad_entropy_N is None else (grad_entropy_N[part], entropy_N[part]),
                None if grad_kl_N is None else (grad_kl_N[part], log_rest_N[part], ctx.top.at(part)),
                # The sum for a bias must not be one of rounded numbers.
                wide if grad_bias_V is not None else hidden_NH.dtype,
            )
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
            del raw_CV, grad_CV
            ctx.each_chunk()
        return (
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            *[None] * 8,
        )


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _measure(
    raw_CV: torch.Tensor,
    dropped_CV: torch.Tensor | None,
    targets_C: torch.Tensor,
    temperatures_C: torch.Tensor,
    scale: LogitScale,
    top: TopTokens | None,
) -> tuple[torch.Tensor, ...]:
    """[C] log π of the targets, the entropy, and log Σ exp of the logits at the temperature.

    With `top` also the KL, and log π of all other tokens together: the lowest number if there are none.
    """
    logits_CV = _tempered(scale.logits(raw_CV), temperatures_C, dropped_CV)
    log_sum_C = logits_CV.logsumexp(dim=-1)
    logprobs_C = logits_CV.gather(1, targets_C[:, None]).squeeze(1) - log_sum_C
    probs_CV = (logits_CV - log_sum_C[:, None]).exp_()
    measured = logprobs_C, log_sum_C - (probs_CV * logits_CV).sum(dim=-1), log_sum_C
    if top is None:
        return measured
    del probs_CV
    return *measured, *forward_kl(logits_CV, log_sum_C, top)


def _gradient(
    raw_CV: torch.Tensor,
    dropped_CV: torch.Tensor | None,
    targets_C: torch.Tensor,
    temperatures_C: torch.Tensor,
    scale: LogitScale,
    log_sum_C: torch.Tensor,
    grad_C: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    of_kl: tuple[torch.Tensor, torch.Tensor, TopTokens] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[C, V] gradient for `raw_CV` in `dtype`, from that for log π of the targets.

    `of_entropy` is the gradient for the entropy, and the entropy; `of_kl` that for the KL, log π of all tokens but the
    top ones, and these.
    """
    logits_CV = scale.logits(raw_CV)
    slope = scale.slope(logits_CV)
    logprobs_CV = _tempered(logits_CV, temperatures_C, dropped_CV).sub_(log_sum_C[:, None])
    pull_C = grad_C / temperatures_C
    probs_CV, push_CV = logprobs_CV.exp_() if of_entropy is None else logprobs_CV.exp(), None
    if of_entropy is not None:
        # d entropy / d logits = −π (log π + entropy) / temperature. A token that was not kept has a π of 0.
        grad_entropy_C, entropy_C = of_entropy
        push_CV = logprobs_CV.add_(entropy_C[:, None]).mul_(probs_CV).mul_((grad_entropy_C / temperatures_C)[:, None])
    # d log π(target) / d logits = (1 at the target − π) / temperature
    if of_kl is None:
        grad_CV = probs_CV.mul_(-pull_C[:, None])
    else:
        grad_kl_C, log_rest_C, top = of_kl
        grad_CV = add_forward_kl_gradient(probs_CV, -pull_C, grad_kl_C / temperatures_C, log_rest_C, top)
    if push_CV is not None:
        grad_CV = grad_CV.sub_(push_CV)
    grad_CV = _add_at(grad_CV, targets_C, pull_C)
    if isinstance(slope, torch.Tensor) or slope != 1:
        grad_CV = grad_CV.mul_(slope)
    return grad_CV.to(dtype)


def _add_at(values_CV: torch.Tensor, targets_C: torch.Tensor, added_C: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        return values_CV.scatter_add_(1, targets_C[:, None], added_C[:, None])
    # After a scatter another kernel would read all values again.
    is_target_CV = torch.arange(values_CV.shape[1], device=values_CV.device) == targets_C[:, None]
    return values_CV + torch.where(is_target_CV, added_C[:, None], 0)


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
    """[C, V] logits of the output layer, float32 or float64; without gradient.

    On GPUs they are never rounded to 16 bits. A CPU would take twice as long for such a product.
    """
    wide = _wide(hidden_CH)
    if hidden_CH.is_cuda and hidden_CH.dtype != wide:
        # Sums 16-bit products in float32, and keeps the sums.
        logits_CV = torch.mm(hidden_CH, weight_VH.t(), out_dtype=wide)
        return logits_CV if bias_V is None else logits_CV.add_(bias_V)
    return torch.nn.functional.linear(hidden_CH, weight_VH, bias_V).to(wide)


def _dropped(kept: KeptTokens | None, logits_CV: torch.Tensor) -> torch.Tensor | None:
    """[C, V] whether truncated sampling could not draw the token; None if nothing was truncated."""
    if kept is None:
        return None
    dropped_CV = (kept.counts_N > 0)[:, None].repeat(1, logits_CV.shape[1])
    rows_C = torch.arange(len(dropped_CV), device=dropped_CV.device)
    # With its size a device need not be waited for.
    rows_K = rows_C.repeat_interleave(kept.counts_N, output_size=len(kept.tokens_K))
    dropped_CV[rows_K, kept.tokens_K] = False
    return dropped_CV


def _tempered(logits_CV: torch.Tensor, temperatures_C: torch.Tensor, dropped_CV: torch.Tensor | None) -> torch.Tensor:
    """[C, V] at the temperature, in place; the lowest number for tokens that are not kept."""
    if torch.compiler.is_compiling():
        # A graph that changes its input writes it back.
        logits_CV = logits_CV / temperatures_C[:, None]
    else:
        logits_CV = logits_CV.div_(temperatures_C[:, None])
    if dropped_CV is None:
        return logits_CV
    # Its probability is 0 next to any kept one. Minus infinity would make an entropy of 0 · ∞.
    return logits_CV.masked_fill_(dropped_CV, torch.finfo(logits_CV.dtype).min)
