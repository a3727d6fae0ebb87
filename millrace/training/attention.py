"""Causal attention over packed sequences; no sequence sees another.

    q, k, v [1, heads, S, features] ─┬─ a GPU, 16-bit numbers ─► one kernel over all sequences (flash attention, varlen)
                                     └─ else ─► one call per run of sequences of the same length, as a batch

transformers' models use it under the name `PACKED`; each forward passes them the microbatch as `packing`. Fewer key and
value heads than query heads are fine (grouped queries). Windows, sinks and biases are not supported. There is no
dropout: π has to be the same in each pass.
"""

from itertools import groupby

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

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
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Called by transformers in each layer: [1, heads, S, features] each, in; [1, S, heads, features] out."""
    # Flash attention takes no 32-bit numbers, and no heads whose size is not a multiple of 8.
    if query.is_cuda and query.dtype in _HALF and query.shape[-1] % 8 == 0:
        out_SHD = _varlen(query[0], key[0], value[0], packing, scaling)
    else:
        out_SHD = _run_by_run(query[0], key[0], value[0], packing, scaling)
    return out_SHD[None], None


def _varlen(
    query_HSD: torch.Tensor, key_GSD: torch.Tensor, value_GSD: torch.Tensor, packing: Microbatch, scaling: float
) -> torch.Tensor:
    out_SHD = varlen_attn(
        query_HSD.transpose(0, 1),
        key_GSD.transpose(0, 1),
        value_GSD.transpose(0, 1),
        packing.cu_seqlens_Q1,
        packing.cu_seqlens_Q1,
        packing.lengths[-1],
        packing.lengths[-1],
        scale=scaling,
        # Causal: no token after its own.
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert isinstance(out_SHD, torch.Tensor)
    return out_SHD


def _run_by_run(
    query_HSD: torch.Tensor, key_GSD: torch.Tensor, value_GSD: torch.Tensor, packing: Microbatch, scaling: float
) -> torch.Tensor:
    outs, start = [], 0
    for length, run in groupby(packing.lengths):
        count = len(list(run))
        # A view, not a copy: neighbours of the same length are a batch.
        query_RHTD, key_RGTD, value_RGTD = (
            one.narrow(1, start, count * length).view(len(one), count, length, -1).transpose(0, 1)
            for one in (query_HSD, key_GSD, value_GSD)
        )
        out_RHTD = scaled_dot_product_attention(
            query_RHTD, key_RGTD, value_RGTD, is_causal=True, scale=scaling, enable_gqa=True
        )
        outs.append(out_RHTD.transpose(1, 2).flatten(0, 1))
        start += count * length
    return torch.cat(outs)


# No mask function is registered under this name, so transformers makes no mask.
AttentionInterface.register(PACKED, packed_attention)
