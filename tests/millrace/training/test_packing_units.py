"""Packing: as few microbatches as first-fit decreasing makes, and ranks that hardly wait for each other."""

import random
from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.training.packing import Unit, fill, single_unit

HIDDEN = 8
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def alone(lengths: Sequence[int]) -> list[Unit]:
    return [single_unit(length, place) for place, length in enumerate(lengths)]


def first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> int:
    """Bins of the textbook's algorithm."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((number for number, left in enumerate(room) if left >= length), None)
        if at is None:
            room.append(max_tokens - length)
        else:
            room[at] -= length
    return len(room)


def cost(lengths: Sequence[int], places: Sequence[int], hidden: int = HIDDEN) -> float:
    """Tokens, and pairs of which one attends to the other."""
    return sum(lengths[place] + lengths[place] * (lengths[place] + 1) / 2 / (6 * hidden) for place in places)


@settings(max_examples=100)
@given(lengths=sizes, max_tokens=st.integers(1, 200), ranks=st.integers(1, 5))
def test_there_are_as_many_microbatches_as_first_fit_decreasing_makes_rounded_up_to_the_ranks(
    lengths: list[int], max_tokens: int, ranks: int
) -> None:
    found = fill(alone(lengths), max_tokens, ranks, HIDDEN)
    fewest = first_fit_decreasing(lengths, max_tokens)
    assert len(found) == -(-fewest // ranks) * ranks
    assert sorted(place for places in found for place in places) == list(range(len(lengths)))
    for places in found:
        assert sum(lengths[place] for place in places) <= max_tokens or len(places) == 1


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60), ranks=st.integers(1, 6))
def test_where_the_budget_does_not_bind_ranks_differ_by_less_than_the_costliest_sample(
    lengths: list[int], ranks: int
) -> None:
    costs = [cost(lengths, places) for places in fill(alone(lengths), sum(lengths), ranks, HIDDEN)]
    assert len(costs) == ranks
    assert max(costs) - min(costs) <= max(cost(lengths, [place]) for place in range(len(lengths))) + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_in_each_round_the_ranks_have_nearly_equal_work(seed: int) -> None:
    drawn = random.Random(seed)
    lengths = [min(4000, int(drawn.lognormvariate(6, 0.8)) + 1) for _ in range(1024)]
    ranks = 8
    costs = [cost(lengths, places, 256) for places in fill(alone(lengths), 16_384, ranks, 256)]
    waits = sum(max(costs[first : first + ranks]) for first in range(0, len(costs), ranks))
    assert waits < 1.02 * fmean(costs) * len(costs) / ranks


def test_long_samples_are_spread_by_what_their_attention_costs() -> None:
    # Eight of 100 tokens cost as much as one of 800, but for attention.
    units = alone([800] + [100] * 8 + [1])
    by_tokens, by_cost = fill(units, 10_000, 2), fill(units, 10_000, 2, HIDDEN)
    assert sorted(len(places) for places in by_tokens) == [2, 8]
    assert sorted(len(places) for places in by_cost) == [1, 9]
