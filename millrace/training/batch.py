"""Packs samples of any lengths into the microbatches of one optimizer step, without padding.

samples ─► units ─► microbatches ─► rank i mod ranks          (units.py)

    one microbatch    p p p │ r r │ r r │ r │ p p r r r       S positions, segments end to end; the first prompt stands
    cu_seqlens        0       3     5     7   8         13    once for three responses (prefix_tree.py)
    predicts          2 3 2 5 2 9 10 11                       position whose hidden state predicts each response token

Shapes: S positions, Q segments, T keys that segments see, N response tokens of the microbatch, including those without
loss; L of them that carry loss; K token ids that truncated sampling kept, of all response tokens together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from millrace.models.routers import NOT_RECORDED
from millrace.training.prefix_tree import counts, lay_out, saves_enough
from millrace.training.units import cut_into_units, fill, whole


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
    """Samples packed in segments; position `predicts_N[n]` predicts response token n.

    A segment is a whole sample, or tokens that several samples begin with, or the rest of one of these.
    """

    input_ids_S: torch.Tensor
    """[S] int64, tokens of prompts and responses."""
    positions_S: torch.Tensor
    """[S] int64, index of the token in its sample."""
    cu_seqlens_Q1: torch.Tensor
    """[Q + 1] int32, start of each segment, then S."""
    lengths: tuple[int, ...]
    """[Q] lengths of the segments; unlike `cu_seqlens_Q1` readable without waiting for a device."""
    keys_T: torch.Tensor | None
    """[T] int64 into S: what each segment sees, segment after segment, itself last; None if each sees itself alone."""
    cu_keys_Q1: torch.Tensor
    """[Q + 1] int32, start of what each segment sees, then T; `cu_seqlens_Q1` if each sees itself alone."""
    key_lengths: tuple[int, ...]
    """[Q] how many tokens the last one of each segment sees, ascending."""
    where_W: torch.Tensor
    """[W] int64 into S: each token of each sample, sample after sample; empty in a spare rank's dummy batch."""
    sample_lengths: tuple[int, ...]
    """Lengths of the samples, W in all."""
    predicts_N: torch.Tensor
    """[N] int64 into S: the position before the token."""
    targets_N: torch.Tensor
    """[N] int64, the tokens."""
    carries_L: torch.Tensor
    """[L] int64, ascending: the response tokens that carry loss. A mask would make a device wait to count them."""
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
    kept_sizes_N: npt.NDArray[np.int64] | None
    """`kept_counts_N`, readable without waiting for a device."""
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
    samples: Sequence[Sample],
    max_tokens: int,
    num_ranks: int = 1,
    *,
    places: Sequence[int] | None = None,
    share_prefixes: bool = True,
    hidden_size: int | None = None,
) -> list[Microbatch]:
    """Splits a batch, or its samples at `places`, into few microbatches of at most `max_tokens` tokens.

    A longer sample is a microbatch of its own. Their number is a multiple of `num_ranks`; rank i takes those with index
    i modulo `num_ranks`. If there are fewer units than ranks, spare ranks get a one-token dummy batch; without any
    samples there are no microbatches. The split depends on the samples alone, so every rank computes the same one, and
    the same batch gives the same floating-point sums. `share_prefixes` says whether tokens that samples begin with may
    stand once. Ranks get equal work, attention included if the model's `hidden_size` is given.
    """
    chosen = range(len(samples)) if places is None else places
    sizes = np.array([len(sample.response_tokens) for sample in samples], dtype=np.int64)
    starts = (np.cumsum(sizes) - sizes).tolist()
    sequences = {place: _sequence(samples[place]) for place in chosen}
    units = [whole(len(sequence), place) for place, sequence in sequences.items()]
    families = _families(samples, chosen) if share_prefixes else []
    saved = sum(len(samples[places[0]].prompt_tokens) * (len(places) - 1) for places in families)
    share = share_prefixes and saves_enough(list(sequences.values()), saved)
    if share:
        most = -(-sum(unit.tokens for unit in units) // num_ranks)
        responses = [[(place, int(sizes[place])) for place in family] for family in families]
        prompts = [len(samples[family[0]].prompt_tokens) for family in families]
        units = cut_into_units(prompts, responses, min(max_tokens, most))
    return [
        _pack(
            [samples[place] for place in them],
            [sequences[place] for place in them],
            tuple(them),
            [starts[place] for place in them],
            share,
        )
        for them in fill(units, max_tokens, num_ranks, hidden_size)
    ]


def pack(sample: Sample) -> Microbatch:
    """A microbatch of one sample."""
    return _pack([sample], [_sequence(sample)], (0,), [0], share=False)


def _families(samples: Sequence[Sample], chosen: Iterable[int]) -> list[list[int]]:
    """Samples of the same prompt, computed by the same experts, together; in each equal lengths are neighbours."""
    by_prompt: dict[bytes, list[int]] = {}
    for place in chosen:
        key = samples[place].prompt_tokens.tobytes()
        if len(experts := samples[place].routed_experts):
            width = len(experts) // (samples[place].num_tokens - 1)
            key += experts[: width * len(samples[place].prompt_tokens)].tobytes()
        by_prompt.setdefault(key, []).append(place)
    # Samples of a length are in the order of the batch once a list is reversed, as `fill` does.
    return [sorted(places, key=lambda place: (samples[place].num_tokens, -place)) for places in by_prompt.values()]


def _pack(
    samples: Sequence[Sample],
    sequences: Sequence[npt.NDArray[np.int32]],
    places: tuple[int, ...],
    firsts: Sequence[int],
    share: bool,
) -> Microbatch:
    """`firsts` are the indices of the responses' first tokens among all response tokens of the batch."""
    sizes = np.array([len(one.response_tokens) for one in samples], dtype=np.int64)
    lengths = [len(sequence) for sequence in sequences]
    experts = _routed_experts(samples)
    # A rank without samples gets one dummy token: the ranks wait for each other in every layer.
    layout = lay_out(_with_experts(sequences, experts) or [np.zeros(1, np.int32)], share=share)
    index_N = counts(sizes)
    # Of each response token, the one before it, among the tokens of all samples.
    before_N = np.repeat(np.cumsum(lengths, dtype=np.int64) - sizes - 1, sizes) + index_N

    def of_tokens(values: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *values], dtype=dtype, casting="unsafe"))

    def of_responses(values: Sequence[float], dtype: npt.DTypeLike) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), sizes))

    def at_positions(values: npt.NDArray[np.generic]) -> torch.Tensor:
        found = np.zeros((len(layout.positions_S), *values.shape[1:]), dtype=np.int64)
        found[layout.where[: len(values)]] = values
        return torch.from_numpy(found)

    truncated = any(len(one.kept_counts) for one in samples)
    counted = [one.kept_counts if len(one.kept_counts) else np.zeros(len(one.response_tokens)) for one in samples]
    kept_counts_N = of_tokens(counted, np.int64) if truncated else None
    return Microbatch(
        input_ids_S=at_positions(np.concatenate([np.zeros(0, np.int32), *sequences])),
        positions_S=torch.from_numpy(layout.positions_S),
        cu_seqlens_Q1=_borders(layout.lengths),
        lengths=layout.lengths,
        keys_T=None if layout.keys_T is None else torch.from_numpy(layout.keys_T),
        cu_keys_Q1=_borders(layout.key_lengths),
        key_lengths=layout.key_lengths,
        where_W=torch.from_numpy(layout.where[: sum(lengths)]),
        sample_lengths=tuple(lengths),
        predicts_N=torch.from_numpy(layout.where[before_N]),
        targets_N=of_tokens([one.response_tokens for one in samples], np.int64),
        carries_L=of_tokens([one.loss_mask for one in samples], np.bool_).nonzero().squeeze(1),
        rollout_logprobs_N=of_tokens([one.rollout_logprobs for one in samples], np.float32),
        advantages_N=of_responses([one.advantage for one in samples], np.float32),
        temperatures_N=of_responses([one.temperature for one in samples], np.float32),
        staleness_N=of_responses([one.staleness for one in samples], np.int64),
        response_N=of_responses(range(len(samples)), np.int64),
        in_batch_N=of_responses(firsts, np.int64) + torch.from_numpy(index_N),
        kept_tokens_K=of_tokens([one.kept_tokens for one in samples], np.int64) if truncated else None,
        kept_counts_N=kept_counts_N,
        kept_sizes_N=None if kept_counts_N is None else kept_counts_N.numpy(),
        routed_experts_SX=None if experts is None else at_positions(experts),
        places=places,
    )


def _borders(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _sequence(sample: Sample) -> npt.NDArray[np.int32]:
    return np.concatenate([sample.prompt_tokens, sample.response_tokens])


def _routed_experts(samples: Sequence[Sample]) -> npt.NDArray[np.int32] | None:
    """[tokens of all samples, layers · experts per token] experts of each token; None if no sample has any."""
    widths = {len(one.routed_experts) // (one.num_tokens - 1) for one in samples if len(one.routed_experts)}
    if not widths:
        return None
    (width,) = widths
    found = np.full((sum(one.num_tokens for one in samples), width), NOT_RECORDED, dtype=np.int32)
    start = 0
    for one in samples:
        if len(one.routed_experts):
            found[start : start + one.num_tokens - 1] = one.routed_experts.reshape(-1, width)
        start += one.num_tokens
    return found


def _with_experts(
    sequences: Sequence[npt.NDArray[np.int32]], experts: npt.NDArray[np.int32] | None
) -> Sequence[npt.NDArray[np.int32]]:
    """Tokens that different experts compute are different."""
    if experts is None:
        return sequences
    ends = np.cumsum([len(one) for one in sequences])
    parts = np.split(experts, ends[:-1])
    return [np.column_stack([one, part]) for one, part in zip(sequences, parts, strict=True)]
