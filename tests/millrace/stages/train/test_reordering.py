"""How many groups overtook another, as the trainer takes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.stages.train.batch_collector import Reordering


@pytest.mark.parametrize(
    ("generators", "numbers", "counts"),
    [
        (2, (0, 2, 4, 6), [0, 0, 0, 0]),
        (2, (0, 2, 8, 6, 4), [0, 0, 0, 1, 2]),
        (3, (3, 7, 10, 4, 0), [0, 0, 0, 2, 1]),
        (1, (0, 2, 2, 2, 1), [0, 0, 0, 0, 1]),
    ],
    ids=["in order", "stragglers", "several generators", "taken again"],
)
def test_a_straggler_counts_the_later_groups_taken_before_it(
    generators: int, numbers: tuple[int, ...], counts: list[int]
) -> None:
    order = Reordering(generators)
    assert [order.take(number) for number in numbers] == counts


@given(st.integers(1, 3), st.lists(st.integers(0, 40), unique=True))
def test_it_counts_all_higher_numbers_of_the_generator_before_it(generators: int, numbers: list[int]) -> None:
    order = Reordering(generators)
    for place, number in enumerate(numbers):
        overtaking = [other for other in numbers[:place] if other > number and (other - number) % generators == 0]
        assert order.take(number) == len(overtaking)
