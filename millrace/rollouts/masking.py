"""Tokens without loss: those too old to train on, and with `training.selection.truncated: mask` those of responses that
were cut off.

    versions of a response   3 3 3 4 4 4 4 5 5          the trainer is at version 8, the bound is 4
    tokens with loss         0 0 0 1 1 1 1 1 1          8 − 3 > 4

A response of many versions is as stale as its oldest token, but only that token is. So its too old tokens carry no
loss, and the rest of the group is trained on. Its reward counts in the baseline, however much of it is masked.

What is masked follows from the spans, the trainer's version and the bound. The trainer stores how many tokens of each
response it masked. They are the oldest of those with loss, so a replay finds them without knowing the bound.

The reward of a response without its end says that there was no answer, and not that the tokens so far were wrong
(overlong filtering, DAPO, arXiv 2503.14476, §3.4). It counts in the group's baseline too. Which responses were cut off
is stored with them, and the setting of a run never changes, so a replay masks the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from configs.training import SelectionConfig
from millrace.rollouts.scored_group import ScoredGroup
from millrace.rollouts.staleness import oldest_trainable


def mask_too_old(group: ScoredGroup, trainer_version: int, max_staleness: int) -> ScoredGroup:
    """The group as a trainer at `trainer_version` may train it: without loss on tokens beyond the bound."""
    first = oldest_trainable(trainer_version, max_staleness)
    if group.min_policy_version >= first:
        return group
    return _masked(group, [first] * len(group.rewards))


def mask_as_stored(group: ScoredGroup, masked_tokens: Sequence[int]) -> ScoredGroup:
    """The group as it was trained, where the step masked so many tokens of each member.

    Raises ValueError if no bound masks exactly so many.
    """
    if not any(masked_tokens):
        return group
    masked = _masked(group, [_first_version(group, i, count) for i, count in enumerate(masked_tokens)])
    if masked.masked_tokens != list(masked_tokens):
        raise ValueError(f"no bound masks {list(masked_tokens)} tokens of the members of group {group.group_id}")
    return masked


def mask_truncated(group: ScoredGroup, config: SelectionConfig) -> ScoredGroup:
    """The group without loss on responses that were cut off, if the config asks for it."""
    if config.truncated == "train" or not any(group.truncated):
        return group
    masks = [mask * (not cut_off) for mask, cut_off in zip(group.loss_mask, group.truncated, strict=True)]
    return replace(group, loss_mask=masks, masks_truncated=True)


def _masked(group: ScoredGroup, first_versions: Sequence[int]) -> ScoredGroup:
    """Without loss on tokens of versions before `first_versions`, one a member."""
    masks = [_mask(group, i, first) for i, first in enumerate(first_versions)]
    counts = [int(old.sum()) - int(new.sum()) for old, new in zip(group.loss_mask, masks, strict=True)]
    return replace(group, loss_mask=masks, masked_tokens=counts)


def _mask(group: ScoredGroup, member: int, first_version: int) -> npt.NDArray[np.uint8]:
    old = group.loss_mask[member]
    if group.min_policy_versions[member] >= first_version:
        return old
    return old * (group.token_versions(member) >= first_version)


def _first_version(group: ScoredGroup, member: int, masked_tokens: int) -> int:
    """The version of the oldest token with loss that is left when so many are masked."""
    versions = np.sort(group.token_versions(member)[group.loss_mask[member] > 0])
    if masked_tokens == 0:
        return int(group.min_policy_versions[member])
    return int(versions[masked_tokens]) if masked_tokens < len(versions) else int(group.max_policy_versions[member]) + 1
