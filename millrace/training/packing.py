"""Packs samples of any lengths into the microbatches of one optimizer step, without padding.

samples ─► all tokens but the last one of each: nothing is predicted from it
        ─► units: samples that share a prompt, in pieces that fit a microbatch, and leave work for every rank
units ─► as many microbatches as first-fit decreasing takes ─┬─ the costliest first, each into the cheapest microbatch
                                                             └─ or, if they don't fit so, as first-fit decreasing does
microbatches, the costliest first ─► rank i mod ranks, in rounds of one per rank: ranks wait for each other in each

A microbatch costs its positions, plus the pairs of tokens that attend to each other. Shapes as in batch.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from millrace.models.modules import NOT_RECORDED
from millrace.training.batch import Microbatch, Sample
from millrace.training.logprobs import KeptTokens
from millrace.training.losses.forward_kl import TopTokens
from millrace.training.prefix_tree import LEAST_TOKENS, counts, lay_out, saves_enough

_PAIR_COST = 1 / 6
"""Cost of a pair in tokens, times the hidden size: a pair takes two products of 2 · hidden operations in each layer, a
token some 24 · hidden² for the layer's weights."""


class Unit(NamedTuple):
    """Samples that go into one microbatch."""

    tokens: int
    """Upper bound of its positions."""
    pairs: int
    """Positions that each position attends to, itself included, summed."""
    indices: list[int]
    """Samples, ascending by their length."""


def microbatches(
    samples: Sequence[Sample],
    max_tokens: int,
    num_ranks: int = 1,
    *,
    rank: int | None = None,
    indices: Sequence[int] | None = None,
    share_prefixes: bool = True,
    hidden_size: int | None = None,
) -> list[Microbatch]:
    """Splits a batch, or its samples at `indices`, into few microbatches of at most `max_tokens` tokens.

    A longer sample is a separate microbatch. Their number is a multiple of `num_ranks`; rank i takes those with index
    i modulo `num_ranks`, and if `rank` is given, only its own are packed and returned. If there are fewer units than
    ranks, spare ranks get a one-token dummy batch. The split depends on the samples alone, so every rank computes the
    same one, and the same batch gives the same floating-point sums. `share_prefixes`: whether prefixes that samples
    share are computed once. Ranks get equal work, attention included if the model's `hidden_size` is given.
    """
    chosen = range(len(samples)) if indices is None else indices
    sizes = np.array([len(sample.response_tokens) for sample in samples], dtype=np.int64)
    starts = (np.cumsum(sizes) - sizes).tolist()
    sequences = {index: _sequence(samples[index]) for index in chosen}
    families = _families(samples, chosen) if share_prefixes else []
    saved = sum(len(samples[family[0]].prompt_tokens) * (len(family) - 1) for family in families)
    share = share_prefixes and saves_enough(list(sequences.values()), saved)
    if not share:
        families = [[index] for index in chosen]
    most = -(-sum(len(sequence) for sequence in sequences.values()) // num_ranks)
    units = [unit for family in families for unit in _cut(samples, family, min(max_tokens, most))]
    shares = fill(units, max_tokens, num_ranks, hidden_size)
    return [
        _pack(
            [samples[index] for index in members],
            [sequences[index] for index in members],
            tuple(members),
            [starts[index] for index in members],
            share,
        )
        for members in (shares if rank is None else shares[rank::num_ranks])
    ]


def pack(sample: Sample) -> Microbatch:
    """A microbatch of one sample."""
    return _pack([sample], [_sequence(sample)], (0,), [0], share=False)


def _families(samples: Sequence[Sample], chosen: Iterable[int]) -> list[list[int]]:
    """Samples of the same prompt, computed by the same experts, together; in each equal lengths are neighbours."""
    by_prompt: dict[bytes, list[int]] = {}
    for index in chosen:
        key = samples[index].prompt_tokens.tobytes()
        if len(experts := samples[index].routed_experts):
            width = len(experts) // (samples[index].num_tokens - 1)
            key += experts[: width * len(samples[index].prompt_tokens)].tobytes()
        by_prompt.setdefault(key, []).append(index)
    # Samples of a length are in the order of the batch once a list is reversed, as `fill` does.
    return [sorted(indices, key=lambda index: (samples[index].num_tokens, -index)) for indices in by_prompt.values()]


def _cut(samples: Sequence[Sample], family: Sequence[int], most: int) -> Iterator[Unit]:
    """Units of at most `most` tokens, or of a single sample, out of the samples of one prompt, ascending by length."""
    prompt = len(samples[family[0]].prompt_tokens)
    piece: list[int] = []
    tokens = 0
    for index in family:
        size = len(samples[index].response_tokens) - 1
        # A piece of several may share up to LEAST_TOKENS less than its prompt.
        if piece and prompt + LEAST_TOKENS + tokens + size > most:
            yield _unit(samples, prompt, piece)
            tokens, piece = 0, []
        tokens += size
        piece.append(index)
    yield _unit(samples, prompt, piece)


def _unit(samples: Sequence[Sample], prompt: int, piece: list[int]) -> Unit:
    sizes = [len(samples[index].response_tokens) - 1 for index in piece]
    tokens = prompt + sum(sizes) + LEAST_TOKENS * (len(piece) > 1)
    pairs = prompt * (prompt + 1) // 2 + sum(size * prompt + size * (size + 1) // 2 for size in sizes)
    return Unit(tokens, pairs, piece)


def fill(units: Sequence[Unit], max_tokens: int, num_ranks: int, hidden_size: int | None = None) -> list[list[int]]:
    """Sample indices of each microbatch, those of the cheapest unit first, so that equal lengths are neighbours.

    No microbatch has more than `max_tokens` tokens, unless it is a unit that has more. Their number is a multiple of
    `num_ranks`. Units of equal cost keep the order of the batch.
    """
    pair_cost = 0.0 if hidden_size is None else _PAIR_COST / hidden_size
    costs = {id(unit): unit.tokens + pair_cost * unit.pairs for unit in units}
    tightest = _first_fit(sorted(units, key=lambda unit: (-unit.tokens, unit.indices[-1])), max_tokens)
    # Never more microbatches than units, rounded up to a multiple of the ranks.
    num_shares = -(-len(tightest) // num_ranks) * num_ranks
    costliest_first = sorted(units, key=lambda unit: (-costs[id(unit)], unit.indices[-1]))
    shares = _balanced(costliest_first, [costs[id(unit)] for unit in costliest_first], max_tokens, num_shares)
    if shares is None:
        shares = tightest + [[] for _ in range(num_shares - len(tightest))]
    # Of equal shares the one with the costlier unit, so that only samples of equal length depend on their order.
    shares.sort(key=lambda share: (sum(spent := [costs[id(unit)] for unit in share]), spent), reverse=True)
    return [[index for unit in reversed(share) for index in unit.indices] for share in shares]


def _first_fit(largest_first: Sequence[Unit], max_tokens: int) -> list[list[Unit]]:
    """Each unit into the first share that has room for it."""
    shares: list[list[Unit]] = []
    room_S = np.zeros(len(largest_first), dtype=np.int64)
    for unit in largest_first:
        fits_S = room_S[: len(shares)] >= unit.tokens
        number = int(fits_S.argmax()) if fits_S.any() else len(shares)
        if number == len(shares):
            shares.append([])
            room_S[number] = max_tokens
        shares[number].append(unit)
        room_S[number] -= unit.tokens
    return shares


def _balanced(
    costliest_first: Sequence[Unit], costs: Sequence[float], max_tokens: int, num_shares: int
) -> list[list[Unit]] | None:
    """Each unit into the cheapest share that has room for it, the first of equals; None if one finds no room."""
    shares: list[list[Unit]] = [[] for _ in range(num_shares)]
    tokens_S, costs_S = np.zeros(num_shares, dtype=np.int64), np.zeros(num_shares)
    for unit, cost in zip(costliest_first, costs, strict=True):
        fits_S = (tokens_S == 0) | (tokens_S + unit.tokens <= max_tokens)
        if not fits_S.any():
            return None
        number = int(np.where(fits_S, costs_S, np.inf).argmin())
        shares[number].append(unit)
        tokens_S[number] += unit.tokens
        costs_S[number] += cost
    return shares


def _pack(
    samples: Sequence[Sample],
    sequences: Sequence[npt.NDArray[np.int32]],
    indices: tuple[int, ...],
    firsts: Sequence[int],
    share: bool,
) -> Microbatch:
    """`firsts` are the indices of the responses' first tokens among all response tokens of the batch."""
    sizes = np.array([len(sample.response_tokens) for sample in samples], dtype=np.int64)
    lengths = [len(sequence) for sequence in sequences]
    experts = _routed_experts(samples)
    if experts is not None:
        # Tokens that different experts compute are different.
        experts_of = np.split(experts, np.cumsum(lengths)[:-1])
        distinct = [np.column_stack([sequence, part]) for sequence, part in zip(sequences, experts_of, strict=True)]
    # A rank without samples gets one dummy token: the ranks wait for each other in every layer.
    layout = lay_out((sequences if experts is None else distinct) or [np.zeros(1, np.int32)], share=share)
    index_N = counts(sizes)
    # Of each response token, the one before it, among the computed tokens of all samples.
    before_N = np.repeat(np.cumsum(lengths, dtype=np.int64) - sizes, sizes) + index_N

    def of_responses(values: Sequence[float], dtype: npt.DTypeLike) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), sizes))

    def at_positions(values: npt.NDArray[np.generic]) -> torch.Tensor:
        placed = np.zeros((len(layout.positions_S), *values.shape[1:]), dtype=np.int64)
        placed[layout.where[: len(values)]] = values
        return torch.from_numpy(placed)

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
        targets_N=_of_tokens([sample.response_tokens for sample in samples], np.int64),
        trainable_L=_of_tokens([sample.loss_mask for sample in samples], np.bool_).nonzero().squeeze(1),
        rollout_logprobs_N=_of_tokens([sample.rollout_logprobs for sample in samples], np.float32),
        advantages_N=of_responses([sample.advantage for sample in samples], np.float32),
        teacher_logprobs_N=_of_tokens(
            [
                sample.teacher_logprobs if len(sample.teacher_logprobs) else np.zeros(len(sample.response_tokens))
                for sample in samples
            ],
            np.float32,
        ),
        teacher_top=_likeliest_of_teacher(samples),
        temperatures_N=of_responses([sample.temperature for sample in samples], np.float32),
        staleness_N=of_responses([sample.staleness for sample in samples], np.int64),
        response_N=of_responses(range(len(samples)), np.int64),
        in_batch_N=of_responses(firsts, np.int64) + torch.from_numpy(index_N),
        kept=_kept_tokens(samples),
        routed_experts_SX=None if experts is None else at_positions(experts),
        indices=indices,
    )


def _of_tokens(values: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *values], dtype=dtype, casting="unsafe"))


def _kept_tokens(samples: Sequence[Sample]) -> KeptTokens | None:
    """The tokens that truncated sampling kept; None if no token was truncated."""
    if not any(len(sample.kept_counts) for sample in samples):
        return None
    counted = [
        sample.kept_counts if len(sample.kept_counts) else np.zeros(len(sample.response_tokens)) for sample in samples
    ]
    counts_N = _of_tokens(counted, np.int64)
    return KeptTokens(_of_tokens([sample.kept_tokens for sample in samples], np.int64), counts_N, counts_N.numpy())


def _likeliest_of_teacher(samples: Sequence[Sample]) -> TopTokens | None:
    """The likeliest tokens of the samples' teacher, equally many for each token; None without `top_k`."""
    if not any(len(sample.teacher_top_tokens) for sample in samples):
        return None
    tokens = _of_tokens([sample.teacher_top_tokens for sample in samples], np.int64)
    logprobs = _of_tokens([sample.teacher_top_logprobs for sample in samples], np.float32)
    num_tokens = sum(len(sample.response_tokens) for sample in samples)
    return TopTokens(tokens.view(num_tokens, -1), logprobs.view(num_tokens, -1))


def _borders(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _sequence(sample: Sample) -> npt.NDArray[np.int32]:
    """The tokens that are computed. Nothing follows from the last one."""
    return np.concatenate([sample.prompt_tokens, sample.response_tokens[:-1]])


def _routed_experts(samples: Sequence[Sample]) -> npt.NDArray[np.int32] | None:
    """[tokens of all samples, layers · experts per token] experts of each token; None if no sample has any."""
    widths = {len(sample.routed_experts) // (sample.num_tokens - 1) for sample in samples if len(sample.routed_experts)}
    if not widths:
        return None
    (width,) = widths
    parts = [
        sample.routed_experts.reshape(-1, width)
        if len(sample.routed_experts)
        else np.full((sample.num_tokens - 1, width), NOT_RECORDED)
        for sample in samples
    ]
    return np.concatenate(parts, dtype=np.int32)
