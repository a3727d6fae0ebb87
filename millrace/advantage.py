"""Advantages from the rewards of a group: how much better a response did than its siblings."""

from collections.abc import Sequence


def group_mean_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean reward of the group (LlamaRL, arXiv 2505.24034); one value a response, zero sum."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
