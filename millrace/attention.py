"""Causal attention over sequences that lie end to end, none of which sees another.

    q, k, v [1, heads, S, features] ─┬─ a GPU, 16-bit numbers ─► one kernel over all sequences (flash attention, varlen)
                                     └─ else ─► one call for each run of sequences of the same length, as a batch

transformers' models take it for their attention under the name `PACKED`, and are given a `Packing` with each forward.
Fewer key and value heads than query heads are fine (grouped queries); windows, sinks and biases are not, and dropout is
left out: π has to be the same in each pass.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from millrace.batch import Microbatch

PACKED = "millrace_packed"
"""What a model's config calls this attention."""
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where sequences lie that are end to end."""

    cu_seqlens_Q1: torch.Tensor
    """[Q + 1] int32, on the device of the tokens."""
    longest: int
    """Length of the longest sequence."""
    runs: tuple[tuple[int, int], ...]
    """(how many, of which length) neighbours of one length there are, from the first position on."""

    @classmethod
    def of(cls, batch: Microbatch) -> Self:
        """Of a microbatch."""
        runs = tuple((len(list(run)), length) for length, run in groupby(batch.lengths))
        return cls(cu_seqlens_Q1=batch.cu_seqlens_Q1, longest=max(batch.lengths), runs=runs)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: [1, heads, S, features] each, in; [1, S, heads, features] out."""
    # Flash attention has neither 32-bit numbers nor heads whose size 8 doesn't divide.
    if query.is_cuda and query.dtype in _HALF and query.shape[-1] % 8 == 0:
        out_SHD = _varlen(query[0], key[0], value[0], packing, scaling)
    else:
        out_SHD = _run_by_run(query[0], key[0], value[0], packing, scaling)
    return out_SHD[None], None


def _varlen(
    query_HSD: torch.Tensor, key_GSD: torch.Tensor, value_GSD: torch.Tensor, packing: Packing, scaling: float
) -> torch.Tensor:
    out_SHD = varlen_attn(
        query_HSD.transpose(0, 1),
        key_GSD.transpose(0, 1),
        value_GSD.transpose(0, 1),
        packing.cu_seqlens_Q1,
        packing.cu_seqlens_Q1,
        packing.longest,
        packing.longest,
        scale=scaling,
        # No token behind its own: causal.
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert isinstance(out_SHD, torch.Tensor)
    return out_SHD


def _run_by_run(
    query_HSD: torch.Tensor, key_GSD: torch.Tensor, value_GSD: torch.Tensor, packing: Packing, scaling: float
) -> torch.Tensor:
    outs, start = [], 0
    for count, length in packing.runs:
        # Another view of the same numbers: sequences of one length are a batch.
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


# Without a mask function of this name transformers makes none, as there is none to make.
AttentionInterface.register(PACKED, packed_attention)
