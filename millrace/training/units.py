"""Which samples go into the same microbatch.

samples of one prompt ─► units: in pieces that fit a microbatch, and leave work for every rank
units ─► as many microbatches as first-fit decreasing takes ─┬─ the costliest first, each into the cheapest microbatch
                                                             └─ or, if they don't fit so, as first-fit decreasing does
microbatches, the costliest first ─► rounds of one per rank: ranks wait for each other in each

What a microbatch costs is its tokens, and the pairs of tokens of which one attends to the other.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from millrace.training.prefix_tree import LEAST_TOKENS

_PAIR_COST = 1 / 6
"""Cost of a pair in tokens, times the hidden size: a pair takes two products of 2 · hidden operations in each layer, a
token some 24 · hidden² for the layer's weights."""


class Unit(NamedTuple):
    """Samples that go into one microbatch."""

    tokens: int
    """At most so many positions."""
    pairs: int
    """Positions that each position attends to, itself included, summed."""
    places: list[int]
    """Ascending by the length of the samples."""


def whole(tokens: int, place: int) -> Unit:
    """A sample alone."""
    return Unit(tokens, tokens * (tokens + 1) // 2, [place])


def cut_into_units(prompts: Iterable[int], responses: Iterable[Sequence[tuple[int, int]]], most: int) -> list[Unit]:
    """Units of at most `most` tokens, or of a single sample.

    Per prompt its tokens in `prompts`, and in `responses` the samples' places with their response's tokens, ascending.
    """
    units = []
    for prompt, family in zip(prompts, responses, strict=True):
        tokens = 0
        piece: list[tuple[int, int]] = []
        for place, own in family:
            # A piece of several may share up to LEAST_TOKENS less than its prompt.
            if piece and prompt + LEAST_TOKENS + tokens + own > most:
                units.append(_of_family(prompt, piece))
                tokens, piece = 0, []
            tokens += own
            piece.append((place, own))
        units.append(_of_family(prompt, piece))
    return units


def _of_family(prompt: int, piece: Sequence[tuple[int, int]]) -> Unit:
    tokens = prompt + sum(own for _, own in piece) + LEAST_TOKENS * (len(piece) > 1)
    pairs = prompt * (prompt + 1) // 2 + sum(own * prompt + own * (own + 1) // 2 for _, own in piece)
    return Unit(tokens, pairs, [place for place, _ in piece])


def fill(units: Sequence[Unit], max_tokens: int, num_ranks: int, hidden_size: int | None = None) -> list[list[int]]:
    """Places of the samples of each microbatch, those of the cheapest unit first, so that equal lengths are neighbours.

    No microbatch has more than `max_tokens` tokens, unless it is a unit that has more. Their number is a multiple of
    `num_ranks`. Pairs cost something if the model's `hidden_size` is given. Units of equal cost keep the order of the
    batch.
    """
    pair_cost = 0.0 if hidden_size is None else _PAIR_COST / hidden_size
    costs = {id(unit): unit.tokens + pair_cost * unit.pairs for unit in units}
    tightest = _first_fit(sorted(units, key=lambda unit: (-unit.tokens, unit.places[-1])), max_tokens)
    # Never more microbatches than units, rounded up to a multiple of the ranks.
    num_shares = -(-len(tightest) // num_ranks) * num_ranks
    costliest_first = sorted(units, key=lambda unit: (-costs[id(unit)], unit.places[-1]))
    shares = _balanced(costliest_first, [costs[id(unit)] for unit in costliest_first], max_tokens, num_shares)
    if shares is None:
        shares = tightest + [[] for _ in range(num_shares - len(tightest))]
    # Of equal shares the one with the costlier unit, so that only samples of equal length depend on their order.
    shares.sort(key=lambda share: (sum(spent := [costs[id(unit)] for unit in share]), spent), reverse=True)
    return [[place for unit in reversed(share) for place in unit.places] for share in shares]


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
