"""Which samples go into the same microbatch.

samples of one prompt ─► units: in pieces that fit a microbatch, and leave work for every rank
units ──largest first, each into the emptiest──► microbatches, as few as they fit into
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from millrace.training.prefix_tree import LEAST_TOKENS


class Unit(NamedTuple):
    """Samples that go into one microbatch."""

    tokens: int
    """At most so many positions."""
    places: list[int]
    """Ascending by the length of the samples."""


def cut_into_units(prompts: Iterable[int], responses: Iterable[Sequence[tuple[int, int]]], most: int) -> list[Unit]:
    """Units of at most `most` tokens, or of a single sample.

    Per prompt its tokens in `prompts`, and in `responses` the samples' places with their response's tokens, ascending.
    """
    units = []
    for prompt, family in zip(prompts, responses, strict=True):
        tokens = 0
        piece: list[int] = []
        for place, own in family:
            # A piece of several may share up to LEAST_TOKENS less than its prompt.
            if piece and prompt + LEAST_TOKENS + tokens + own > most:
                units.append(Unit(prompt + tokens + LEAST_TOKENS * (len(piece) > 1), piece))
                tokens, piece = 0, []
            tokens += own
            piece.append(place)
        units.append(Unit(prompt + tokens + LEAST_TOKENS * (len(piece) > 1), piece))
    return units


def fill(units: Sequence[Unit], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Places of the samples of each microbatch, those of the smallest unit first, so that equal lengths are neighbours.

    No microbatch has more than `max_tokens` tokens, unless it is a unit that has more. Their number is a multiple of
    `num_ranks`. Units of equal length keep the order of the batch.
    """
    largest_first = sorted(units, key=lambda unit: (-unit.tokens, unit.places[-1]))
    # Never more microbatches than units, rounded up to a multiple of the ranks.
    total = sum(unit.tokens for unit in units)
    num_shares = num_ranks * min(-(-total // (max_tokens * num_ranks)), -(-len(units) // num_ranks))
    while True:
        shares: list[list[Unit]] = [[] for _ in range(num_shares)]
        emptiest = [(0, number) for number in range(num_shares)]
        for unit in largest_first:
            tokens, number = heapq.heappop(emptiest)
            if tokens and tokens + unit.tokens > max_tokens:
                break
            shares[number].append(unit)
            heapq.heappush(emptiest, (tokens + unit.tokens, number))
        else:
            return [[place for unit in reversed(share) for place in unit.places] for share in shares]
        num_shares += num_ranks
