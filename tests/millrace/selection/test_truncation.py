"""Responses that were cut off: no loss, and still part of the baseline."""

import pytest
from support.streams.scored_groups import scored_group

from configs.training import SelectionConfig
from millrace.rollouts.masking import mask_as_stored, mask_too_old
from millrace.selection.truncation import mask_truncated
from millrace.training.samples import samples_of

MASK = SelectionConfig(truncated="mask")


def test_a_response_that_was_cut_off_carries_no_loss_and_its_reward_makes_the_baseline() -> None:
    group = mask_truncated(scored_group(0, [[1], [1, 1], [1]], [1.0, 0.0, 0.5], truncated=[1]), MASK)
    assert (group.trained, group.verified, group.drop_reason) == ([0, 2], [0, 1, 2], None)
    assert group.left_out == {"truncated": [1]}
    assert [mask.tolist() for mask in group.loss_mask] == [[1], [0, 0], [1]]
    assert [sample.advantage for sample in samples_of([group], "group_mean", 1)] == [0.5, 0.0]


@pytest.mark.parametrize(("config", "truncated"), [(SelectionConfig(), [0, 1]), (MASK, [])])
def test_without_the_setting_or_without_such_a_response_the_group_stays_as_it_is(
    config: SelectionConfig, truncated: list[int]
) -> None:
    group = scored_group(0, [[1], [1]], [1.0, 0.0], truncated=truncated)
    assert mask_truncated(group, config) is group


def test_a_group_of_nothing_else_is_dropped() -> None:
    group = mask_truncated(scored_group(0, [[1], [1], [1]], [1.0, 0.0, None], truncated=[0, 1]), MASK)
    assert group.drop_reason == "truncated"
    one_reward = mask_truncated(scored_group(0, [[1], [1]], [1.0, None], truncated=[0]), MASK)
    assert one_reward.drop_reason == "error"


def test_a_group_is_as_stale_as_what_is_left_of_it() -> None:
    group = mask_truncated(scored_group(0, [[1], [4, 5]], [1.0, 0.0], truncated=[0]), MASK)
    assert group.staleness(6) == 2


def test_what_is_both_cut_off_and_too_old_is_masked_the_same_when_it_is_replayed() -> None:
    stored = scored_group(0, [[1, 1, 6], [1, 6], [6]], [1.0, 0.0, 0.5], truncated=[0])
    trained = mask_too_old(mask_truncated(stored, MASK), 7, 2)
    replayed = mask_truncated(mask_as_stored(stored, trained.masked_tokens), MASK)
    assert trained.masked_tokens == [0, 1, 0]
    assert [mask.tolist() for mask in replayed.loss_mask] == [mask.tolist() for mask in trained.loss_mask]
    assert replayed.left_out == trained.left_out == {"truncated": [0]}
