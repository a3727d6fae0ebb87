"""Bounds that move from version to version, and the tokens that a trainer may train under them."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.control.staleness import Bounds
from millrace.rollouts.staleness import admission_limit

TARGETS = st.lists(st.integers(0, 9), min_size=1, max_size=40)


def moved(targets: list[int]) -> Bounds:
    """Bounds that went for these targets, one a version; the first is in force from the beginning."""
    bounds = Bounds([(0, targets[0])])
    for version, target in enumerate(targets):
        bounds.move(version, target)
    return bounds


def test_a_bound_rises_at_once_and_falls_by_one_a_version() -> None:
    bounds = moved([1, 1, 4, 4, 1, 1, 1, 1, 1])
    assert [bounds.in_force(version) for version in range(9)] == [1, 1, 4, 4, 3, 2, 1, 1, 1]
    assert [bounds.oldest_trainable(version) for version in range(9)] == [0, 0, 1, 2, 2, 2, 2, 3, 7]


def test_a_constant_bound_is_the_bound_of_every_version() -> None:
    bounds = Bounds([(0, 3)])
    assert [bounds.oldest_trainable(version) for version in range(7)] == [0, 0, 0, 0, 1, 2, 3]


@settings(max_examples=200, deadline=None)
@given(TARGETS, st.data())
def test_no_trained_token_exceeds_the_bound_of_its_version(targets: list[int], data: st.DataObject) -> None:
    bounds = Bounds(json.loads(json.dumps(moved(targets).changes)))
    trainer = data.draw(st.integers(0, len(targets) - 1))
    for version in range(trainer + 1):
        assert (version >= bounds.oldest_trainable(trainer)) == (trainer - version <= bounds.in_force(version))


@settings(max_examples=200, deadline=None)
@given(TARGETS, st.integers(1, 5))
def test_groups_that_are_taken_in_their_order_are_never_too_old(targets: list[int], per_step: int) -> None:
    bounds, admitted_under, trainer = moved(targets), [], 0
    # The generator is always at the trainer's version and admits all that it may; the trainer steps when it can.
    while trainer < len(targets) - 1:
        limit = admission_limit(
            trainer, max_staleness=bounds.in_force(trainer), groups_per_step=per_step, groups_dropped=0
        )
        admitted_under += [trainer] * (limit - len(admitted_under))
        step = admitted_under[trainer * per_step : (trainer + 1) * per_step]
        assert len(step) == per_step, "a falling bound leaves the trainer enough"
        assert min(step) >= bounds.oldest_trainable(trainer)
        trainer += 1
