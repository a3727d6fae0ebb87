"""Causal attention behind a prefix, or with a sliding window, a soft cap or sinks, over segments of the same length.

    positions of the queries       keys that a block needs: the prefix, and those of its band
    block 0   ▐▌                   with a window of w, a block of b queries sees at most b + w − 1 keys,
    block 1   ▐▌▐▌                 so time and memory grow with the length, and not with its square
    block 2     ▐▌▐▌

The queries are the last T of L positions; the L − T before them are the prefix.

Shapes: R segments, H query heads, G key heads, T queries, L keys, B queries of a block, K keys of its band, D features.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

BLOCK = 256
"""Queries of a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """What a layer's attention has beyond the causal mask."""

    window: int | None = None
    """Positions that a token sees, its own included; None: all before it."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""
    sinks_H: torch.Tensor | None = None
    """[H] one more score per head. It takes its share of the softmax, and has no value."""

    def is_plain(self, num_keys: int) -> bool:
        """Whether queries of `num_keys` keys need the causal mask alone."""
        return self.softcap is None and self.sinks_H is None and (self.window is None or self.window >= num_keys)


def banded_attention(
    query_RHTD: torch.Tensor, key_RGLD: torch.Tensor, value_RGLD: torch.Tensor, scaling: float, band: Band
) -> torch.Tensor:
    """[R, H, T, D] causal attention in a band; fewer key heads than query heads are fine."""
    if band.softcap is not None and band.sinks_H is not None:
        raise ValueError("no family of models has both a soft cap and sinks")
    length, device = key_RGLD.shape[2], query_RHTD.device
    prefix = length - query_RHTD.shape[2]
    outs = []
    for start in range(prefix, length, BLOCK):
        end = min(start + BLOCK, length)
        first = 0 if band.window is None else max(0, start - band.window + 1)
        distance_BK = torch.arange(start, end, device=device)[:, None] - torch.arange(first, end, device=device)
        seen_BK = distance_BK >= 0 if band.window is None else (distance_BK >= 0) & (distance_BK < band.window)
        queries = query_RHTD[:, :, start - prefix : end - prefix]
        block = queries, key_RGLD[:, :, first:end], value_RGLD[:, :, first:end]
        if band.softcap is not None:
            # No kernel caps scores, and these would all be kept for the backward pass.
            outs.append(
                checkpoint(
                    _capped, *block, seen_BK, scaling, band.softcap, use_reentrant=False, preserve_rng_state=False
                )
            )
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
