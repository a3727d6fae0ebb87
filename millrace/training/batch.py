"""Packs samples of any lengths into the microbatches of one optimizer step, without padding.

samples ──longest first, each into the emptiest──► microbatches of at most `max_tokens` ──► rank i mod ranks

    one microbatch    p p p r r │ p r r r │ p p r         S positions, sequences end to end
    cu_seqlens        0           5         9       12    where each begins; attention stays between two of them
    predicts          2 3         5 6 7     10            position whose hidden state predicts each response token

Shapes: S positions, Q sequences, N response tokens of the microbatch, including those without loss; K token ids that
truncated sampling kept, of all response tokens together.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from millrace.models.routers import NOT_RECORDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A trajectory and its advantage: what the trainer gets."""

    prompt_tokens: npt.NDArray[np.int32]
    """[P] token ids, at least one."""
    response_tokens: npt.NDArray[np.int32]
    """[R] token ids, the end-of-sequence token included."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[R] log μ of the behaviour policy, after temperature and top-p, nats."""
    loss_mask: npt.NDArray[np.uint8]
    """[R] 1 where a token carries loss."""
    temperature: float
    """Of the behaviour policy; the trainer divides its logits by it too, so that π and μ are comparable."""
    advantage: float
    staleness: int
    """Policy versions by which the trainer is ahead of the oldest one that sampled a token, of those not masked."""
    group: int = 0
    """Index of its group in the batch."""
    kept_tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[K] token ids that truncated sampling could draw from, token by token; empty if nothing was truncated. The
    trainer renormalises π over the same tokens, so that π and μ are comparable."""
    kept_counts: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R] how many of them belong to each token, 0 if it was not truncated; empty if no token was."""
    routed_experts: npt.NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))
    """[P + R - 1, layers, experts per token] flat: the experts that computed each token but the last in the generator;
    empty if they were not recorded."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt_tokens) + len(self.response_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Samples packed end to end; position `predicts_N[n]` predicts response token n."""

    input_ids_S: torch.Tensor
    """[S] int64, tokens of prompts and responses."""
    positions_S: torch.Tensor
    """[S] int64, from 0 in each sequence."""
    cu_seqlens_Q1: torch.Tensor
    """[Q + 1] int32, start of each sequence, then S."""
    lengths: tuple[int, ...]
    """[Q] lengths of the sequences, ascending; unlike `cu_seqlens_Q1` readable without waiting for a device."""
    predicts_N: torch.Tensor
    """[N] int64 into S: the position before the token."""
    targets_N: torch.Tensor
    """[N] int64, the tokens."""
    loss_mask_N: torch.Tensor
    """[N] bool, whether a token carries loss."""
    rollout_logprobs_N: torch.Tensor
    """[N] float32, log μ, nats."""
    advantages_N: torch.Tensor
    """[N] float32, of the token's response."""
    temperatures_N: torch.Tensor
    """[N] float32, of the token's response."""
    staleness_N: torch.Tensor
    """[N] int64, of the token's response."""
    response_N: torch.Tensor
    """[N] int64, ascending: index of the token's response in this microbatch."""
    in_batch_N: torch.Tensor
    """[N] int64: index of the token among all response tokens of the batch, in the order of its samples."""
    kept_tokens_K: torch.Tensor | None
    """[K] int64, token ids that truncated sampling could draw from, token by token; None if nothing was truncated."""
    kept_counts_N: torch.Tensor | None
    """[N] int64, how many of them belong to each token, 0 if it was not truncated; None if no token was."""
    routed_experts_SX: torch.Tensor | None
    """[S, layers · experts per token] int64, the generator's experts, `NOT_RECORDED` where there are none; None if no
    sample has any."""
    places: tuple[int, ...]
    """[Q] indices of the samples in the batch; empty in a spare rank's dummy batch."""

    def to(self, device: torch.device) -> Self:
        """A copy with the tensors on `device`."""
        named: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        moved = {name: value.to(device) for name, value in named.items() if isinstance(value, torch.Tensor)}
        return replace(self, **{**named, **moved})


def microbatches(
    samples: Sequence[Sample], max_tokens: int, num_ranks: int = 1, *, places: Sequence[int] | None = None
) -> list[Microbatch]:
    """Splits a batch, or its samples at `places`, into few microbatches of at most `max_tokens` tokens.

    A longer sample is a microbatch of its own. Their number is a multiple of `num_ranks`; rank i takes those with index
    i modulo `num_ranks`. If there are fewer samples than ranks, spare ranks get a one-token dummy batch; without any
    samples there are no microbatches. The split depends on the samples alone, so every rank computes the same one, and
    the same batch gives the same floating-point sums.
    """
    chosen = range(len(samples)) if places is None else places
    ends = np.cumsum([len(sample.response_tokens) for sample in samples])
    starts = ends - [len(sample.response_tokens) for sample in samples]
    return [
        _pack([samples[place] for place in share], tuple(share), [int(starts[place]) for place in share])
        for share in _shares({place: samples[place].num_tokens for place in chosen}, max_tokens, num_ranks)
    ]


def pack(sample: Sample) -> Microbatch:
    """A microbatch of one sample."""
    return _pack([sample], (0,), [0])


def _shares(lengths: Mapping[int, int], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Places of the samples of each microbatch, ascending by length, so that equal lengths are neighbours.

    `lengths` are the samples' numbers of tokens by place.
    """
    # Samples of equal length keep the order of the batch.
    longest_first = sorted(lengths, key=lambda place: (-lengths[place], place))
    # Never more microbatches than samples, rounded up to a multiple of the ranks.
    num_shares = num_ranks * min(-(-sum(lengths.values()) // (max_tokens * num_ranks)), -(-len(lengths) // num_ranks))
    while True:
        shares: list[list[int]] = [[] for _ in range(num_shares)]
        emptiest = [(0, number) for number in range(num_shares)]
        for place in longest_first:
            tokens, number = heapq.heappop(emptiest)
            if tokens and tokens + lengths[place] > max_tokens:
                break
            shares[number].append(place)
            heapq.heappush(emptiest, (tokens + lengths[place], number))
        else:
            return [share[::-1] for share in shares]
        num_shares += num_ranks


def _pack(samples: Sequence[Sample], places: tuple[int, ...], firsts: Sequence[int]) -> Microbatch:
    """`firsts` are the indices of the responses' first tokens among all response tokens of the batch."""
    # A rank without samples gets one dummy token: the ranks wait for each other in every layer.
    sequences = [np.concatenate([one.prompt_tokens, one.response_tokens]) for one in samples] or [np.zeros(1, np.int32)]
    lengths = [len(sequence) for sequence in sequences]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    sizes = [len(one.response_tokens) for one in samples]
    begins = [int(start) + len(one.prompt_tokens) for start, one in zip(cu_seqlens, samples, strict=False)]

    def of_tokens(values: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([*values, np.zeros(0)]).astype(dtype))

    def of_responses(values: Sequence[float], dtype: npt.DTypeLike) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), sizes))

    truncated = any(len(one.kept_counts) for one in samples)
    counts = [one.kept_counts if len(one.kept_counts) else np.zeros(len(one.response_tokens)) for one in samples]
    return Microbatch(
        input_ids_S=torch.from_numpy(np.concatenate(sequences).astype(np.int64)),
        positions_S=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        cu_seqlens_Q1=torch.from_numpy(cu_seqlens.astype(np.int32)),
        lengths=tuple(lengths),
        predicts_N=of_tokens([np.arange(r) + at - 1 for at, r in zip(begins, sizes, strict=True)], np.int64),
        targets_N=of_tokens([one.response_tokens for one in samples], np.int64),
        loss_mask_N=of_tokens([one.loss_mask for one in samples], np.bool_),
        rollout_logprobs_N=of_tokens([one.rollout_logprobs for one in samples], np.float32),
        advantages_N=of_responses([one.advantage for one in samples], np.float32),
        temperatures_N=of_responses([one.temperature for one in samples], np.float32),
        staleness_N=of_responses([one.staleness for one in samples], np.int64),
        response_N=of_responses(range(len(samples)), np.int64),
        in_batch_N=of_tokens([np.arange(r) + first for first, r in zip(firsts, sizes, strict=True)], np.int64),
        kept_tokens_K=of_tokens([one.kept_tokens for one in samples], np.int64) if truncated else None,
        kept_counts_N=of_tokens(counts, np.int64) if truncated else None,
        routed_experts_SX=_routed_experts(samples),
        places=places,
    )


def _routed_experts(samples: Sequence[Sample]) -> torch.Tensor | None:
    """As `Microbatch.routed_experts_SX`."""
    widths = {len(one.routed_experts) // (one.num_tokens - 1) for one in samples if len(one.routed_experts)}
    if not widths:
        return None
    (width,) = widths
    found_SX = np.full((sum(one.num_tokens for one in samples), width), NOT_RECORDED, dtype=np.int64)
    start = 0
    for one in samples:
        if len(one.routed_experts):
            found_SX[start : start + one.num_tokens - 1] = one.routed_experts.reshape(-1, width)
        start += one.num_tokens
    return torch.from_numpy(found_SX)
