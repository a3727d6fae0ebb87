"""Causal attention over packed segments; no sample sees another.

    q, k, v [1, heads, S, features] ─► k, v of what each segment sees, one copy per segment, if any are shared
      ├─ a GPU, 16-bit numbers ─► one kernel over all segments (flash attention, varlen)
      └─ else ─► one call per run of segments of the same length, as a batch
                   └─ behind a prefix, or with window, soft cap or sinks ─► block by block (banded.py)

transformers' models use it under the name `PACKED`; each forward passes them the microbatch as `packing`, and each
layer says what it needs: a sliding window, a soft cap, sinks. Fewer key and value heads than query heads are fine
(grouped queries). There is no dropout: π has to be the same in each pass.
"""

from itertools import groupby

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from millrace.training.attention.banded import Band, banded_attention
from millrace.training.batch import Microbatch

PACKED = "millrace_packed"
"""Name of this attention in a model's config."""
_HALF = (torch.bfloat16, torch.float16)


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

    `sliding_window` counts the positions that a token sees, its own included; `softcap` bounds the scores by a tanh;
    `s_aux` [heads] are the sinks, one more score per head that takes its share of the softmax and adds nothing.
    """
    band = Band(window=sliding_window, softcap=softcap, sinks_H=s_aux)
    key_GTD, value_GTD = _seen(key[0], packing), _seen(value[0], packing)
    # Flash attention takes no 32-bit numbers, and no heads whose size is not a multiple of 8.
    kernel = query.is_cuda and query.dtype in _HALF and query.shape[-1] % 8 == 0
    if kernel and softcap is None and s_aux is None:
        out_SHD = _varlen(query[0], key_GTD, value_GTD, packing, scaling, band)
    else:
        out_SHD = _run_by_run(query[0], key_GTD, value_GTD, packing, scaling, band)
    return out_SHD[None], None


def _seen(one_GSD: torch.Tensor, packing: Microbatch) -> torch.Tensor:
    """[G, T, D] keys or values of what each segment sees, segment after segment."""
    if packing.keys_T is None:
        return one_GSD
    # transformers' tensors are views of [S, G, D], whose rows are copied whole.
    return one_GSD.transpose(0, 1).index_select(0, packing.keys_T).transpose(0, 1)


def _varlen(
    query_HSD: torch.Tensor,
    key_GTD: torch.Tensor,
    value_GTD: torch.Tensor,
    packing: Microbatch,
    scaling: float,
    band: Band,
) -> torch.Tensor:
    out_SHD = varlen_attn(
        query_HSD.transpose(0, 1),
        key_GTD.transpose(0, 1),
        value_GTD.transpose(0, 1),
        packing.cu_seqlens_Q1,
        packing.cu_keys_Q1,
        max(packing.lengths),
        packing.key_lengths[-1],
        scale=scaling,
        # Causal: no token after its own. Before it, all or those of the window. The last query is that of the last key.
        window_size=(-1 if band.window is None else band.window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(out_SHD, torch.Tensor)
    return out_SHD


def _run_by_run(
    query_HSD: torch.Tensor,
    key_GTD: torch.Tensor,
    value_GTD: torch.Tensor,
    packing: Microbatch,
    scaling: float,
    band: Band,
) -> torch.Tensor:
    outs, start, key_start = [], 0, 0
    for (length, num_keys), run in groupby(zip(packing.lengths, packing.key_lengths, strict=True)):
        count = len(list(run))
        # Views, not copies: neighbours of the same lengths are a batch.
        query_RHTD = _batch(query_HSD, start, count, length)
        key_RGLD, value_RGLD = (_batch(one, key_start, count, num_keys) for one in (key_GTD, value_GTD))
        if length == num_keys and band.is_plain(length):
            out_RHTD = scaled_dot_product_attention(
                query_RHTD, key_RGLD, value_RGLD, is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            out_RHTD = banded_attention(query_RHTD, key_RGLD, value_RGLD, scaling, band)
        outs.append(out_RHTD.transpose(1, 2).flatten(0, 1))
        start, key_start = start + count * length, key_start + count * num_keys
    return torch.cat(outs)


def _batch(one_HSD: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """[count, H, length, D] of `count` neighbours of that length from `start` on."""
    return one_HSD.narrow(1, start, count * length).view(len(one_HSD), count, length, -1).transpose(0, 1)


# No mask function is registered under this name, so transformers makes no mask.
AttentionInterface.register(PACKED, packed_attention)
