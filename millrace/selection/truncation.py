"""Responses that were cut off, and `training.selection.truncated: mask`: no token of theirs carries loss.

The reward of a response without its end says that there was no answer, and not that the tokens so far were wrong
(overlong filtering, DAPO, arXiv 2503.14476, §3.4). It counts in the group's baseline.

Which responses were cut off is stored with them, and the setting of a run never changes: a replay masks the same.
"""

from dataclasses import replace

from configs.training import SelectionConfig
from millrace.rollouts.scored_group import ScoredGroup


def mask_truncated(group: ScoredGroup, config: SelectionConfig) -> ScoredGroup:
    """The group without loss on responses that were cut off, if the config asks for it."""
    if config.truncated == "train" or not any(group.truncated):
        return group
    masks = [mask * (not cut_off) for mask, cut_off in zip(group.loss_mask, group.truncated, strict=True)]
    return replace(group, loss_mask=masks, masks_truncated=True)
