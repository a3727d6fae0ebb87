"""How many groups overtook another, as the trainer takes them."""

from hypothesis import given
from hypothesis import strategies as st

from millrace.stages.train.batch_collector import Reordering


def test_groups_that_come_in_order_are_not_reordered() -> None:
    order = Reordering(2)
    assert [order.take(n) for n in (0, 2, 4, 6)] == [0, 0, 0, 0]


def test_a_straggler_counts_the_later_groups_that_came_before_it() -> None:
    order = Reordering(2)
    assert [order.take(n) for n in (0, 2, 8, 6, 4)] == [0, 0, 0, 1, 2]


def test_groups_of_another_generator_do_not_count() -> None:
    order = Reordering(3)
    assert [order.take(n) for n in (3, 7, 10, 4, 0)] == [0, 0, 0, 2, 1]


def test_a_group_that_is_taken_again_counts_once() -> None:
    order = Reordering(1)
    assert [order.take(n) for n in (0, 2, 2, 2, 1)] == [0, 0, 0, 0, 1]


@given(st.integers(1, 3), st.lists(st.integers(0, 40), unique=True))
def test_it_counts_all_higher_numbers_of_the_generator_before_it(generators: int, numbers: list[int]) -> None:
    order = Reordering(generators)
    for place, number in enumerate(numbers):
        before = [other for other in numbers[:place] if other > number and (other - number) % generators == 0]
        assert order.take(number) == len(before)
