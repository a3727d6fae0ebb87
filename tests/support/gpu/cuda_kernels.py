"""Plain versions of kernels that only CUDA has: the same results, slowly."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operations
from torch.optim.adamw import adamw

_ATEN = torch.ops.aten


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch_attn::_varlen_attn, flash attention over sequences of any lengths; [tokens, heads, features] each.

    As its documentation says: the last query belongs to the last key; a window of (left, right) has no bound where it
    is −1.
    """
    out = torch.empty_like(query)
    logsumexp = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    for at, seen in _sequences(cu_seq_q, cu_seq_k, max_q, max_k):
        scores = _scores(query[at], key[seen], scale, window_size, is_causal)
        out[at] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), _repeated(value[seen], query)).to(out.dtype)
        logsumexp[:, at] = scores.logsumexp(dim=-1).float()
    return out, logsumexp, query.new_zeros(2, dtype=torch.uint64)


def attend_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch_attn::_varlen_attn_backward: the gradients of query, key and value."""
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for at, seen in _sequences(cu_seq_q, cu_seq_k, max_q, max_k):
        probs = _scores(query[at], key[seen], scale, window_size, is_causal).softmax(dim=-1)
        towards = grad_out[at].double()
        of_probs = torch.einsum("qhd,khd->hqk", towards, _repeated(value[seen], query))
        of_scores = probs * (of_probs - (probs * of_probs).sum(dim=-1, keepdim=True)) * factor
        grads[0][at] = torch.einsum("hqk,khd->qhd", of_scores, _repeated(key[seen], query)).to(query.dtype)
        grads[1][seen] = _summed(torch.einsum("hqk,qhd->khd", of_scores, query[at].double()), key)
        grads[2][seen] = _summed(torch.einsum("hqk,qhd->khd", probs, towards), value)
    return grads


def add_product(
    summand: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype, *, out: torch.Tensor
) -> torch.Tensor:
    """aten::addmm with a wider result."""
    return out.copy_(summand + left.to(out_dtype) @ right.to(out_dtype))


def product(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """aten::mm with a wider result."""
    return left.to(out_dtype) @ right.to(out_dtype)


def count_values(values: torch.Tensor, bins: int, low: float, high: float) -> torch.Tensor:
    """aten::histc of integers."""
    return _ATEN.histc.default(values.double(), bins, low, high).to(values.dtype)


def update(
    weights: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    max_exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    **options: Any,
) -> None:
    """aten::_fused_adamw_, rounded as torch's AdamW on the CPU rounds."""
    state = [weights, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    # torch has counted the step already.
    steps_before = [step - 1 for step in steps]
    options = {name: options[name] for name in ("amsgrad", "beta1", "beta2", "lr", "weight_decay", "eps", "maximize")}
    adamw(*state, steps_before, foreach=False, fused=False, **options)


KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.torch_attn._varlen_attn.default: attend,
    torch.ops.torch_attn._varlen_attn_backward.default: attend_backward,
    _ATEN.addmm.dtype_out: add_product,
    _ATEN.mm.dtype: product,
    _ATEN.histc.default: count_values,
    _ATEN._fused_adamw_.default: update,
}


def _sequences(cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, max_q: int, max_k: int) -> Iterator[tuple[slice, slice]]:
    borders = pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist())
    for (first, last), (first_k, last_k) in zip(*borders, strict=True):
        # The kernel reads no further.
        assert last - first <= max_q
        assert last_k - first_k <= max_k
        yield slice(first, last), slice(first_k, last_k)


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float | None, window_size: list[int] | None, is_causal: bool
) -> torch.Tensor:
    """[heads, queries, keys] float64; minus infinity where a query does not see a key."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", query.double(), _repeated(key, query)) * factor
    left, right = window_size or (-1, -1)
    if is_causal:
        right = 0
    behind = len(key) - len(query)
    distance = torch.arange(len(query))[:, None] + behind - torch.arange(len(key))
    unseen = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        unseen |= distance > left
    if right >= 0:
        unseen |= distance < -right
    return scores.masked_fill(unseen, -torch.inf)


def _repeated(one: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[keys, query heads, features] float64: each key head as often as query heads share it."""
    return one.double().repeat_interleave(query.shape[1] // one.shape[1], dim=1)


def _summed(of_heads: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    keys, _, features = of_heads.shape
    return of_heads.view(keys, like.shape[1], -1, features).sum(dim=2).to(like.dtype)
