"""From trajectories of any lengths to the packed tensors of one optimizer step: no position is padding.

samples ──longest first, each into the emptiest──► microbatches of at most so many tokens ──► rank i mod ranks

    one microbatch    p p p r r │ p r r r │ p p r         S positions, sequences end to end
    cu_seqlens        0           5         9       12    where each begins; attention stays between two of them
    predicts          2 3         5 6 7     10            from whose hidden state each response token is predicted

Shapes: S positions, Q sequences, N response tokens of the microbatch, those without loss too.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One trajectory as the trainer sees it."""

    prompt_tokens: npt.NDArray[np.int32]
    """[P] token ids, at least one."""
    response_tokens: npt.NDArray[np.int32]
    """[R] token ids, the end-of-sequence token included."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[R] log μ of the behaviour policy, after temperature and top-p, nats."""
    loss_mask: npt.NDArray[np.uint8]
    """[R] 1 where a token carries loss."""
    temperature: float
    """Of the behaviour policy: the trainer's logits are divided by it too, for π and μ to be of one kind."""
    advantage: float
    staleness: int
    """Policy versions by which the trainer is ahead of the oldest one that sampled any of the response."""

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_tokens) + len(self.response_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Some samples end to end; the n-th of the response tokens is predicted at position `predicts_N[n]`."""

    input_ids_S: torch.Tensor
    """[S] int64, prompts and responses."""
    positions_S: torch.Tensor
    """[S] int64, from 0 in each sequence."""
    cu_seqlens_Q1: torch.Tensor
    """[Q + 1] int32, where each sequence begins, and S."""
    lengths: tuple[int, ...]
    """[Q] of the sequences, ascending: `cu_seqlens_Q1` for who would have to wait for a device to read it."""
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
    """[N] int64, ascending: which of this microbatch's responses the token belongs to."""
    in_batch_N: torch.Tensor
    """[N] int64: the token's place among all response tokens of the batch, sample after sample as they were given."""
    places: tuple[int, ...]
    """[Q] which of the batch's samples these are; empty in a microbatch that only keeps a rank busy."""

    def to(self, device: torch.device) -> Self:
        """The same with its tensors on `device`."""
        named: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        moved = {name: value.to(device) for name, value in named.items() if isinstance(value, torch.Tensor)}
        return replace(self, **{**named, **moved})


def microbatches(samples: Sequence[Sample], max_tokens: int, num_ranks: int = 1) -> list[Microbatch]:
    """Splits a batch into as few microbatches of at most `max_tokens` tokens, or of one longer sample, as it goes.

    Their number is a multiple of `num_ranks`; rank i takes every one whose index is i modulo that. Where there are
    fewer samples than ranks, some hold a single token that is nobody's. The split depends on the samples alone, so the
    same batch gives the same floating-point sums, and every rank finds the same one.
    """
    ends = np.cumsum([len(sample.response_tokens) for sample in samples])
    starts = ends - [len(sample.response_tokens) for sample in samples]
    return [
        _pack([samples[place] for place in places], tuple(places), [int(starts[place]) for place in places])
        for places in _shares([sample.num_tokens for sample in samples], max_tokens, num_ranks)
    ]


def pack(sample: Sample) -> Microbatch:
    """One sample alone."""
    return _pack([sample], (0,), [0])


def _shares(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Which samples go together, each share ascending by length: sequences of one length are neighbours."""
    # Equal ones in the order of the batch: which is which must not hang on how a sort breaks ties.
    longest_first = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    # More than one a sample are never wanted.
    num_shares = num_ranks * min(-(-sum(lengths) // (max_tokens * num_ranks)), -(-len(lengths) // num_ranks))
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
    """`firsts` are the places of the responses' first tokens in the batch."""
    # A rank with nothing to train goes through the same layers as the others: all wait for each other in each.
    sequences = [np.concatenate([one.prompt_tokens, one.response_tokens]) for one in samples] or [np.zeros(1, np.int32)]
    lengths = [len(sequence) for sequence in sequences]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    sizes = [len(one.response_tokens) for one in samples]
    begins = [int(start) + len(one.prompt_tokens) for start, one in zip(cu_seqlens, samples, strict=False)]

    def of_tokens(values: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([*values, np.zeros(0)]).astype(dtype))

    def of_responses(values: Sequence[float], dtype: npt.DTypeLike) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), sizes))

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
        places=places,
    )
