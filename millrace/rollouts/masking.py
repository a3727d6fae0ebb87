"""Masks tokens that are too old to train on, and with `training.selection.truncated: mask` all tokens of truncated
responses.

    versions of a response   3 3 3 4 4 4 4 5 5          the trainer is at version 8, the bound is 4
    trainable                0 0 0 1 1 1 1 1 1          8 − 3 > 4

A response that several versions sampled is as stale as its oldest token. Only the tokens beyond the bound are masked;
the rest of the group is trained. The response's reward counts in the baseline, however much of it is masked.

The trainer stores how many tokens of each response it masked. They are the oldest trainable ones, so a replay masks the
same tokens without knowing the bound.

A truncated response earns its reward for having no answer, not because the tokens so far were wrong (overlong
filtering, DAPO, arXiv 2503.14476, §3.4). Its reward counts in the baseline too. Stored rows say which responses were
truncated, and the setting of a run never changes, so a replay masks the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from configs.training import SelectionConfig
from millrace.rollouts.scored_group import ScoredGroup
from millrace.rollouts.staleness import oldest_trainable


def mask_too_old(group: ScoredGroup, trainer_version: int, max_staleness: int) -> ScoredGroup:
    """Masks tokens beyond the bound, for a trainer at `trainer_version`."""
    first = oldest_trainable(trainer_version, max_staleness)
    if group.min_policy_version >= first:
        return group
    return _masked(group, [first] * len(group.rewards))


def mask_as_stored(group: ScoredGroup, masked_tokens: Sequence[int]) -> ScoredGroup:
    """Masks the tokens that a stored step masked; `masked_tokens` is [G], their number in each member.

    Raises ValueError if no bound masks exactly these numbers.
    """
    if not any(masked_tokens):
        return group
    masked = _masked(group, [_first_version(group, i, count) for i, count in enumerate(masked_tokens)])
    if masked.masked_tokens != list(masked_tokens):
        raise ValueError(f"no bound masks {list(masked_tokens)} tokens of the members of group {group.group_id}")
    return masked


def mask_truncated(group: ScoredGroup, config: SelectionConfig) -> ScoredGroup:
    """Masks truncated responses if the config says so."""
    if config.truncated == "train" or not any(group.truncated):
        return group
    masks = [mask * (not truncated) for mask, truncated in zip(group.loss_mask, group.truncated, strict=True)]
    return replace(group, loss_mask=masks, masks_truncated=True)


def _masked(group: ScoredGroup, first_versions: Sequence[int]) -> ScoredGroup:
    """Masks tokens of versions before `first_versions`, which is [G]."""
    masks = [
        old if oldest >= first else old * (group.token_versions(i) >= first)
        for i, (old, oldest, first) in enumerate(
            zip(group.loss_mask, group.min_policy_versions, first_versions, strict=True)
        )
    ]
    counts = [int(old.sum()) - int(new.sum()) for old, new in zip(group.loss_mask, masks, strict=True)]
    return replace(group, loss_mask=masks, masked_tokens=counts)


def _first_version(group: ScoredGroup, member: int, masked_tokens: int) -> int:
    """Version of the oldest token that remains trainable when `masked_tokens` are masked."""
    versions = np.sort(group.token_versions(member)[group.loss_mask[member] > 0])
    if masked_tokens == 0:
        return int(group.min_policy_versions[member])
    return int(versions[masked_tokens]) if masked_tokens < len(versions) else int(group.max_policy_versions[member]) + 1
