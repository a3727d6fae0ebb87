"""Causal attention over packed segments; no sample sees another.

    q, k, v [1, heads, S, features] ─► k, v that each segment attends to, one copy per segment, if any are shared
      ├─ a GPU, 16-bit numbers ─► one kernel over all segments (flash attention, varlen)
      └─ else ─► one call per run of segments of the same length, as a batch
                   └─ behind a prefix, or with window, soft cap or sinks ─► block by block

transformers' models use it under the name `PACKED`; each forward passes them the microbatch as `packing`. Dropout is
never applied: π must be the same in each pass.

Shapes: R segments, H query heads, G key heads, T queries, L keys, B queries of a block, K keys of its band, D features.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from millrace.training.batch import Microbatch

PACKED = "millrace_packed"
"""Name of this attention in a model's config."""
_HALF = (torch.bfloat16, torch.float16)
BLOCK = 256
"""Queries of a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Parameters of a layer's attention beyond the causal mask."""

    window: int | None = None
    """Positions that a token sees, its own included; None: all before it."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""
    sinks_H: torch.Tensor | None = None
    """[H] one more score per head. It takes its share of the softmax, and has no value."""

    def is_plain(self, num_keys: int) -> bool:
        """Whether queries of `num_keys` keys need the causal mask alone."""
        return self.softcap is None and self.sinks_H is None and (self.window is None or self.window >= num_keys)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Microbatch,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Called by transformers in each layer: [1, heads, S, features] each, in; [1, S, heads, features] out.

    `sliding_window`, `softcap` and `s_aux` are as in `Band`.
    """
    # transformers' tensors are views of these, whose rows are whole.
    query_SHD, key_SGD, value_SGD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    key_TGD, value_TGD = _seen(key_SGD, packing), _seen(value_SGD, packing)
    # Flash attention takes no 32-bit numbers, and no heads whose size is not a multiple of 8.
    kernel = query.is_cuda and query.dtype in _HALF and query.shape[-1] % 8 == 0
    if kernel and softcap is None and s_aux is None:
        out_SHD = varlen_attn(
            query_SHD,
            key_TGD,
            value_TGD,
            packing.cu_seqlens_Q1,
            packing.cu_keys_Q1,
            max(packing.lengths),
            packing.key_lengths[-1],
            scale=scaling,
            # Causal: no token after its own. Before it, all or those of the window. The last query is that of the last
            # key.
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=True,
        )
        assert isinstance(out_SHD, torch.Tensor)
    else:
        band = Band(window=sliding_window, softcap=softcap, sinks_H=s_aux)
        out_SHD = _run_by_run(query_SHD, key_TGD, value_TGD, packing, scaling, band)
    return out_SHD[None], None


def _seen(values_SGD: torch.Tensor, packing: Microbatch) -> torch.Tensor:
    """[T, G, D] keys or values that each segment attends to, segment after segment."""
    return values_SGD if packing.keys_T is None else values_SGD.index_select(0, packing.keys_T)


def _run_by_run(
    query_SHD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    packing: Microbatch,
    scaling: float,
    band: Band,
) -> torch.Tensor:
    runs = [(sizes, len(list(run))) for sizes, run in groupby(zip(packing.lengths, packing.key_lengths, strict=True))]
    sizes = [count * length for (length, _), count in runs]
    key_sizes = [count * num_keys for (_, num_keys), count in runs]
    # Split at once: in the backward pass each separate slice would fill, and add, a tensor of all positions.
    queries, keys, values = (
        torch.split(query_SHD, sizes),
        torch.split(key_TGD, key_sizes),
        torch.split(value_TGD, key_sizes),
    )
    outs = []
    for ((length, num_keys), _), query, key, value in zip(runs, queries, keys, values, strict=True):
        # Views, not copies: neighbours of the same lengths are a batch.
        query_RHTD = query.view(-1, length, *query.shape[1:]).transpose(1, 2)
        key_RGLD, value_RGLD = (tensor.view(-1, num_keys, *tensor.shape[1:]).transpose(1, 2) for tensor in (key, value))
        if length == num_keys and band.is_plain(length):
            out_RHTD = scaled_dot_product_attention(
                query_RHTD, key_RGLD, value_RGLD, is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            out_RHTD = banded_attention(query_RHTD, key_RGLD, value_RGLD, scaling, band)
        outs.append(out_RHTD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def banded_attention(
    query_RHTD: torch.Tensor, key_RGLD: torch.Tensor, value_RGLD: torch.Tensor, scaling: float, band: Band
) -> torch.Tensor:
    """[R, H, T, D] causal attention in a band, block by block; fewer key heads than query heads are fine.

    The queries are the last T of L positions; the L − T before them are the prefix. With a window of w, a block of b
    queries sees at most b + w − 1 keys, so time and memory grow with the length, and not with its square. No family of
    models has both a soft cap and sinks.
    """
    length, device = key_RGLD.shape[2], query_RHTD.device
    prefix = length - query_RHTD.shape[2]
    outs = []
    for start in range(prefix, length, BLOCK):
        end = min(start + BLOCK, length)
        first = 0 if band.window is None else max(0, start - band.window + 1)
        seen_BK = torch.ones(end - start, end - first, dtype=torch.bool, device=device).tril(start - first)
        if band.window is not None:
            seen_BK = seen_BK.triu(start - first - band.window + 1)
        queries = query_RHTD[:, :, start - prefix : end - prefix]
        block = queries, key_RGLD[:, :, first:end], value_RGLD[:, :, first:end]
        if band.softcap is not None:
            # No kernel caps scores, and these would all be kept for the backward pass.
            capped = (*block, seen_BK, scaling, band.softcap)
            outs.append(checkpoint(_capped, *capped, use_reentrant=False, preserve_rng_state=False))
        elif band.sinks_H is not None:
            outs.append(_with_sinks(*block, seen_BK, scaling, band.sinks_H))
        else:
            outs.append(scaled_dot_product_attention(*block, attn_mask=seen_BK, scale=scaling, enable_gqa=True))
    return torch.cat(outs, dim=2)


def _capped(
    query_RHBD: torch.Tensor,
    key_RGKD: torch.Tensor,
    value_RGKD: torch.Tensor,
    seen_BK: torch.Tensor,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    num_rows, _, num_queries, num_features = query_RHBD.shape
    query_RGhBD = query_RHBD.reshape(num_rows, key_RGKD.shape[1], -1, num_queries, num_features)
    scores_RGhBK = query_RGhBD @ key_RGKD[:, :, None].transpose(-1, -2) * (scaling / softcap)
    scores_RGhBK = (scores_RGhBK.tanh() * softcap).masked_fill(~seen_BK, -torch.inf)
    wide = torch.promote_types(scores_RGhBK.dtype, torch.float32)
    probs_RGhBK = scores_RGhBK.softmax(dim=-1, dtype=wide).to(query_RHBD.dtype)
    out_RGhBD: torch.Tensor = probs_RGhBK @ value_RGKD[:, :, None]
    return out_RGhBD.flatten(1, 2)


def _with_sinks(
    query_RHBD: torch.Tensor,
    key_RGKD: torch.Tensor,
    value_RGKD: torch.Tensor,
    seen_BK: torch.Tensor,
    scaling: float,
    sinks_H: torch.Tensor,
) -> torch.Tensor:
    # A sink is a key that all see, whose value is 0. One more feature carries its score: the sink's own for queries,
    # 0 for keys, 1 for the key of the sink. So any kernel computes it, and the gradient of the sinks.
    sinks_RHB1 = (sinks_H / scaling).to(query_RHBD.dtype)[None, :, None, None].expand(*query_RHBD.shape[:3], 1)
    query_RHBE = torch.cat([query_RHBD, sinks_RHB1], dim=-1)
    is_sink_E = torch.zeros(query_RHBE.shape[-1], dtype=query_RHBD.dtype, device=query_RHBD.device)
    is_sink_E[-1] = 1
    sink_RG1E = is_sink_E.expand(*key_RGKD.shape[:2], 1, -1)
    key_RGLE = torch.cat([pad(key_RGKD, (0, 1)), sink_RG1E], dim=2)
    out_RHBE = scaled_dot_product_attention(
        query_RHBE,
        key_RGLE,
        pad(value_RGKD, (0, 1, 0, 1)),
        attn_mask=pad(seen_BK, (0, 1), value=True),
        scale=scaling,
        enable_gqa=True,
    )
    return out_RHBE[..., :-1]


# No mask function is registered under this name, so transformers makes no mask.
AttentionInterface.register(PACKED, packed_attention)
