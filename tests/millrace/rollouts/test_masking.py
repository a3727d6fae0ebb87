"""Masks of tokens beyond the staleness bound and of truncated responses, which a replay reproduces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.streams.scored_groups import scored_group

from configs.training import SelectionConfig, TrainingConfig
from millrace.rollouts.ledger import Amount
from millrace.rollouts.masking import mask_as_stored, mask_too_old, mask_truncated
from millrace.rollouts.scored_group import ScoredGroup
from millrace.training.samples import samples_of

MASK = SelectionConfig(truncated="mask")
versions_of_a_member = st.lists(st.integers(0, 8), min_size=1, max_size=12)
rewards = st.one_of(st.none(), st.floats(0, 1))


@st.composite
def groups(draw: st.DrawFn) -> ScoredGroup:
    """Groups whose responses changed weights anywhere, some tokens written by an environment, some rewards missing."""
    versions = draw(st.lists(versions_of_a_member, min_size=1, max_size=5))
    masks = [[draw(st.integers(0, 1)) for _ in member] for member in versions]
    return scored_group(3, versions, [draw(rewards) for _ in versions], masks)


trainers = st.integers(8, 14)
bounds = st.integers(0, 8)


def lists(arrays: list[np.ndarray]) -> list[list[int]]:
    return [array.tolist() for array in arrays]


@given(groups(), trainers, bounds)
def test_sampled_tokens_within_the_bound_are_trainable(group: ScoredGroup, trainer: int, bound: int) -> None:
    masked_group = mask_too_old(group, trainer, bound)
    for i, mask in enumerate(group.loss_mask):
        fresh = trainer - group.token_versions(i) <= bound
        assert masked_group.loss_mask[i].tolist() == [int(old and new) for old, new in zip(mask, fresh, strict=True)]
        assert masked_group.loss_mask[i].dtype == mask.dtype
        assert masked_group.masked_tokens[i] == sum(int(old and not new) for old, new in zip(mask, fresh, strict=True))
    assert masked_group.rewards == group.rewards


@given(groups(), trainers, bounds)
def test_trainable_tokens_are_within_the_bound_and_every_member_is_counted(
    group: ScoredGroup, trainer: int, bound: int
) -> None:
    result = mask_too_old(group, trainer, bound)
    trainable = [i for i, mask in enumerate(result.loss_mask) if mask.any()]
    assert all(trainer - result.oldest_versions[i] <= bound for i in trainable)
    if trainable:
        assert result.staleness(trainer) == max(trainer - result.oldest_versions[i] for i in trainable)
    masked = [i for i in result.verified if result.is_masked(i)]
    failed = [i for i, reward in enumerate(result.rewards) if reward is None]
    assert sorted([*result.trained, *masked, *failed]) == list(range(len(result.rewards)))
    assert result.amount(result.trained) + result.amount(masked) + result.amount(failed) == group.amount()
    assert result.masked_amount() == Amount(
        rollouts=sum(result.masked_tokens[i] > 0 for i in result.trained),
        tokens=sum(result.masked_tokens[i] for i in result.trained),
    )


@given(groups(), trainers, bounds)
def test_stored_counts_reproduce_the_mask(group: ScoredGroup, trainer: int, bound: int) -> None:
    trained = mask_too_old(group, trainer, bound)
    replayed = mask_as_stored(group, trained.masked_tokens)
    assert lists(replayed.loss_mask) == lists(trained.loss_mask)
    assert replayed.masked_tokens == trained.masked_tokens
    assert replayed.oldest_versions.tolist() == trained.oldest_versions.tolist()
    assert replayed.staleness(trainer) == trained.staleness(trainer)
    assert (replayed.trained, replayed.drop_reason) == (trained.trained, trained.drop_reason)


def test_a_group_within_the_bound_is_unchanged() -> None:
    group = scored_group(0, [[4, 5], [5, 5]], [1.0, 0.0])
    assert mask_too_old(group, 8, 4) is group
    assert mask_as_stored(group, [0, 0]) is group


def test_a_too_old_member_is_not_trained_and_keeps_its_reward() -> None:
    group = mask_too_old(scored_group(0, [[1, 1], [1, 6], [6]], [1.0, 0.0, 0.5]), 7, 2)
    assert (group.verified, group.trained, group.drop_reason) == ([0, 1, 2], [1, 2], None)
    assert (group.rewards, group.masked_tokens) == ([1.0, 0.0, 0.5], [2, 1, 0])
    assert group.staleness(7) == 1


def test_a_group_that_is_all_too_old_is_stale() -> None:
    group = mask_too_old(scored_group(0, [[1, 1], [1]], [1.0, 0.0]), 7, 2)
    assert (group.trained, group.drop_reason, group.staleness(7)) == ([], "stale", 6)


def test_a_group_whose_fresh_members_have_no_reward_is_stale() -> None:
    group = mask_too_old(scored_group(0, [[1], [1], [6]], [1.0, 0.0, None]), 7, 2)
    assert group.drop_reason == "stale"


def test_a_group_with_one_reward_is_an_error() -> None:
    assert scored_group(0, [[6], [6]], [1.0, None]).drop_reason == "error"


@pytest.mark.parametrize("counts", [[1, 0], [3, 0], [-1, 0]])
def test_counts_that_no_bound_explains_are_refused(counts: list[int]) -> None:
    group = scored_group(5, [[1, 1], [6]], [1.0, 0.0])
    with pytest.raises(ValueError):
        mask_as_stored(group, counts)


def test_a_truncated_response_is_masked_and_counts_in_the_baseline() -> None:
    group = mask_truncated(scored_group(0, [[1], [1, 1], [1]], [1.0, 0.0, 0.5], truncated=[1]), MASK)
    assert (group.trained, group.verified, group.drop_reason) == ([0, 2], [0, 1, 2], None)
    assert group.drop_reason_of(1) == "truncated"
    assert [mask.tolist() for mask in group.loss_mask] == [[1], [0, 0], [1]]
    assert [sample.advantage for sample in samples_of([group], TrainingConfig(max_steps=1), 1)] == [0.5, 0.0]


@pytest.mark.parametrize(("config", "truncated"), [(SelectionConfig(), [0, 1]), (MASK, [])])
def test_without_the_setting_or_a_truncated_response_nothing_changes(
    config: SelectionConfig, truncated: list[int]
) -> None:
    group = scored_group(0, [[1], [1]], [1.0, 0.0], truncated=truncated)
    assert mask_truncated(group, config) is group


def test_a_group_of_truncated_responses_is_dropped() -> None:
    group = mask_truncated(scored_group(0, [[1], [1], [1]], [1.0, 0.0, None], truncated=[0, 1]), MASK)
    assert group.drop_reason == "truncated"
    one_reward = mask_truncated(scored_group(0, [[1], [1]], [1.0, None], truncated=[0]), MASK)
    assert one_reward.drop_reason == "error"


def test_staleness_is_of_the_trainable_responses() -> None:
    group = mask_truncated(scored_group(0, [[1], [4, 5]], [1.0, 0.0], truncated=[0]), MASK)
    assert group.staleness(6) == 2


def test_a_replay_masks_truncated_and_too_old_tokens_alike() -> None:
    stored = scored_group(0, [[1, 1, 6], [1, 6], [6]], [1.0, 0.0, 0.5], truncated=[0])
    trained = mask_too_old(mask_truncated(stored, MASK), 7, 2)
    replayed = mask_truncated(mask_as_stored(stored, trained.masked_tokens), MASK)
    assert trained.masked_tokens == [0, 1, 0]
    assert [mask.tolist() for mask in replayed.loss_mask] == [mask.tolist() for mask in trained.loss_mask]
    assert replayed.drop_reason_of(0) == trained.drop_reason_of(0) == "truncated"
