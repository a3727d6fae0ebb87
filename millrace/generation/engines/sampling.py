"""Draws the next token of many rows at once, each with its own random numbers, and says which responses end.

logits ─► softmax ─► the top_k likeliest ─► the smallest set with top_p of their mass ─► cumulative sum
                                                                  ─► where the row's uniform number falls

A row needs one uniform number per token. It is a hash of the request's seed and of the token's place in the response.
So it depends neither on other rows nor on when they came.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from millrace.types import FinishReason, Sampling

# SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """[B] float64 in [0, 1): row b's number for the token at `positions[b]` of the response with `seeds[b]`."""
    # Hashed first, so that neighbouring seeds have unrelated streams.
    streams_B = _mixed(np.array(seeds, dtype=np.uint64))
    counters_B = np.array(positions, dtype=np.uint64) + np.uint64(1)
    bits_B = _mixed(streams_B + counters_B * _GAMMA) >> np.uint64(11)
    return torch.from_numpy(bits_B.astype(np.float64) * 2.0**-53)


class Drawn(NamedTuple):
    """The next token of each row."""

    tokens_B: torch.Tensor
    """[B] token ids."""
    logprobs_B: torch.Tensor
    """[B] their log-probabilities after temperature, top-k and top-p, nats."""
    kept: list[list[int]] | None = None
    """[B] of the token ids that each was drawn from, likeliest first; None if nothing was truncated."""


def draw(logits_BV: torch.Tensor, sampling: Sampling, uniforms_B: torch.Tensor) -> Drawn:
    """Draws a token for each row.

    Temperature 0 takes the likeliest token and gives its unscaled log-probability.
    """
    if sampling.temperature == 0:
        best_B = torch.log_softmax(logits_BV.float(), dim=-1).max(dim=-1)
        return Drawn(best_B.indices, best_B.values)
    probabilities_BV = torch.softmax(logits_BV.float() / sampling.temperature, dim=-1)
    if not sampling.truncates:
        # In float64: in float32, steps of 6e-8 would round the probabilities of unlikely tokens.
        mass_BV = probabilities_BV.cumsum(dim=-1, dtype=torch.float64)
        tokens_B1 = _first_above(mass_BV, mass_BV[:, -1:], uniforms_B)
        return Drawn(tokens_B1.squeeze(1), probabilities_BV.gather(1, tokens_B1).log().squeeze(1))
    sorted_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        sorted_BV = sorted_BV[:, : sampling.top_k]
    mass_BV = sorted_BV.cumsum(dim=-1, dtype=torch.float64)
    total_B1 = 1.0 if sampling.top_k is None else mass_BV[:, -1:]
    # A token stays if the likelier ones have less mass than top_p. So the likeliest always stays.
    num_kept_B1 = (mass_BV - sorted_BV < sampling.top_p * total_B1).sum(dim=-1, keepdim=True)
    kept_B1 = mass_BV.gather(1, num_kept_B1 - 1)
    ranks_B1 = _first_above(mass_BV, kept_B1, uniforms_B)
    logprobs_B1 = (sorted_BV.gather(1, ranks_B1) / kept_B1).log().float()
    sizes = num_kept_B1.squeeze(1).tolist()
    kept = [ids[:size] for ids, size in zip(order_BV[:, : max(sizes)].tolist(), sizes, strict=True)]
    return Drawn(order_BV.gather(1, ranks_B1).squeeze(1), logprobs_B1.squeeze(1), kept)


def _first_above(mass_BV: torch.Tensor, total_B1: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """[B, 1] the first index whose cumulated mass is above the uniform share of the total."""
    targets_B1 = uniforms_B.to(mass_BV.device)[:, None] * total_B1
    return torch.searchsorted(mass_BV, targets_B1, right=True)


def _mixed(values_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64; arithmetic is modulo 2^64."""
    values_N = (values_N ^ (values_N >> np.uint64(30))) * _MULTIPLIERS[0]
    values_N = (values_N ^ (values_N >> np.uint64(27))) * _MULTIPLIERS[1]
    return values_N ^ (values_N >> np.uint64(31))


class StopCriteria:
    """Ends responses at the tokens `stop_token_ids`, and at `stop` texts that they contain whole.

    The criterion of `transformers` also looks into the prompt, and needs a tokenizer that knows the letters a to f.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(stop_token_ids)
        self._stop = stop
        # A token is at least one byte of text, so a stop text that was just completed began at most this far back. One
        # more, because some tokenizers drop a blank before the first token that they decode.
        self._look_back = 1 + max((len(text.encode()) for text in stop), default=0)

    def end(self, sampled: list[int], limit: int) -> FinishReason | None:
        """Returns why a response ends with the last of its `sampled` tokens, at most `limit`; None if it doesn't.

        Called after each token.
        """
        if sampled[-1] in self._ends:
            return "stop"
        if self._stop:
            newest = self._tokenizer.decode(sampled[-self._look_back :], clean_up_tokenization_spaces=False)
            if any(stop in newest for stop in self._stop):
                return "stop"
        return "length" if len(sampled) == limit else None
