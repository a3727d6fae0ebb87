"""Scored groups become samples: the members that were judged, with the batch's advantages and their staleness."""

from collections.abc import Sequence

import numpy as np
import pytest

from millrace.samples import samples_of
from millrace.scored import ScoredGroup


def group(number: int, rewards: Sequence[float | None], versions: Sequence[int]) -> ScoredGroup:
    """A group whose i-th response is i + 1 tokens of its number."""
    size = len(rewards)
    return ScoredGroup(
        group_id=number,
        generator=0,
        first_row_id=0,
        prompt_tokens=[np.array([1, number], dtype=np.int32)] * size,
        response_tokens=[np.full(i + 1, number, dtype=np.int32) for i in range(size)],
        rollout_logprobs=[np.full(i + 1, -0.5, dtype=np.float32) for i in range(size)],
        loss_mask=[np.ones(i + 1, dtype=np.uint8) for i in range(size)],
        temperature=0.5 + number,
        rewards=list(rewards),
        min_policy_versions=np.array(versions),
        max_policy_versions=np.array(versions),
        part_max_policy_version=max(versions),
        incarnation=0,
    )


GROUPS = [group(0, [1.0, None, 0.0], [4, 5, 3]), group(1, [2.0, 2.0, 5.0], [2, 2, 1])]


def test_each_judged_member_is_a_sample_in_the_order_of_the_groups() -> None:
    samples = samples_of(GROUPS, "group_mean", 5)
    assert [sample.response_tokens.tolist() for sample in samples] == [[0], [0, 0, 0], [1], [1, 1], [1, 1, 1]]
    assert [sample.temperature for sample in samples] == [0.5, 0.5, 1.5, 1.5, 1.5]
    assert [sample.advantage for sample in samples] == [0.5, -0.5, -1.0, -1.0, 2.0]


def test_an_advantage_may_be_of_the_whole_batch() -> None:
    advantages = [sample.advantage for sample in samples_of(GROUPS, "reinforce_plus_plus", 5)]
    rewards = np.array([1.0, 0.0, 2.0, 2.0, 5.0])
    assert advantages == pytest.approx((rewards - rewards.mean()) / rewards.std(ddof=1), rel=1e-5)


@pytest.mark.parametrize(("versions", "staleness"), [(5, [1, 2, 3, 3, 4]), ([5, 2], [1, 2, 0, 0, 1])])
def test_each_response_lags_behind_the_trainer_of_its_group(versions: int | list[int], staleness: list[int]) -> None:
    assert [sample.staleness for sample in samples_of(GROUPS, "group_mean", versions)] == staleness


def test_no_groups_are_no_samples() -> None:
    assert samples_of([], "group_mean", 0) == []
