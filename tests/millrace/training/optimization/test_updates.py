"""The updates of a batch: every group once an epoch, whole, in an order that seed and version alone decide."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millrace.training.batch import Sample
from millrace.training.optimization.updates import updates


def batch(sizes: list[int], carries: set[int] | None = None) -> list[Sample]:
    """Groups of these numbers of samples; None: all of them carry loss."""
    return [
        Sample(
            prompt_tokens=np.ones(1, np.int32),
            response_tokens=np.ones(1, np.int32),
            rollout_logprobs=np.zeros(1, np.float32),
            loss_mask=np.array([carries is None or group in carries], np.uint8),
            temperature=1.0,
            advantage=1.0,
            staleness=0,
            group=group,
        )
        for group, size in enumerate(sizes)
        for _ in range(size)
    ]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_each_epoch_has_every_group_once_and_whole(sizes: list[int], minibatches: int, epochs: int, seed: int) -> None:
    samples = [*batch(sizes), *batch([1])]
    plan = updates(samples, minibatches=minibatches, epochs=epochs, seed=seed, policy_version=3)
    per_epoch = len(plan) // epochs
    num_groups = len({sample.group for sample in samples})
    assert per_epoch == min(minibatches, num_groups)
    for epoch in range(epochs):
        parts = plan[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(place for part in parts for place in part) == list(range(len(samples)))
        groups = [{samples[place].group for place in part} for part in parts]
        assert sum(map(len, groups)) == num_groups
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        assert all(part == sorted(part) for part in parts)


def test_a_batch_in_one_part_stays_as_it_is() -> None:
    assert updates(batch([2, 2]), minibatches=1, epochs=2, seed=5, policy_version=1) == [[0, 1, 2, 3]] * 2


def test_the_order_follows_from_seed_version_and_epoch() -> None:
    samples = batch([1] * 16)

    def order(seed: int, version: int) -> list[list[int]]:
        return updates(samples, minibatches=4, epochs=2, seed=seed, policy_version=version)

    first = order(0, 1)
    assert order(0, 1) == first
    assert first[:4] != first[4:]
    assert order(1, 1) != first
    assert order(0, 2) != first


def test_groups_that_carry_no_loss_are_in_no_minibatch() -> None:
    samples = batch([2, 2, 2, 2], carries={0, 3})
    assert sorted(updates(samples, minibatches=4, epochs=1, seed=0, policy_version=1)) == [[0, 1], [6, 7]]


def test_a_batch_that_carries_no_loss_is_left_for_the_trainer_to_refuse() -> None:
    assert updates(batch([1, 1], carries=set()), minibatches=2, epochs=1, seed=0, policy_version=1) == [[0, 1]]
