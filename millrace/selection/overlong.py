"""Rewards that fall with the length of overlong responses: soft overlong punishment of DAPO (arXiv 2503.14476, §3.4).

    shaped − stored
      0  ────────────────╮                       L = max_new_tokens, b = buffer_tokens
                          ╲
    −factor                ╲
         0           L − b   L   response tokens

Advantages are made of the shaped rewards. The stored ones, and all that is shown of them, stay as they are. The shaped
reward follows from the stored row and the config, so a replay computes the same.
"""

from configs.learning.selection import OverlongConfig
from millrace.rollouts.scored_group import ScoredGroup


def shaped_rewards(group: ScoredGroup, config: OverlongConfig) -> list[float]:
    """[verified members] rewards that the group's advantages are made of.

    Tokens that an environment wrote count towards the length, as they do towards `max_new_tokens`.
    """
    known = [(reward, len(group.response_tokens[i])) for i, reward in enumerate(group.rewards) if reward is not None]
    if config.buffer_tokens is None:
        return [reward for reward, _ in known]
    first = group.max_new_tokens - config.buffer_tokens
    return [
        reward - config.factor * min(length - first, config.buffer_tokens) / config.buffer_tokens
        if length > first
        else reward
        for reward, length in known
    ]
