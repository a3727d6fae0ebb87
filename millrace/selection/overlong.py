"""Rewards that fall with the length of overlong responses: soft overlong punishment of DAPO (arXiv 2503.14476, §3.4).

    shaped − stored
      0  ────────────────╮                       L = max_new_tokens, b = overlong_buffer
                          ╲
     −1                    ╲
         0           L − b   L   response tokens

Advantages are made of the shaped rewards. The stored ones, and all that is shown of them, stay as they are. The shaped
reward follows from the stored row and the config, so a replay computes the same.
"""

from configs.training import SelectionConfig
from millrace.rollouts.scored_group import ScoredGroup


def shaped_rewards(group: ScoredGroup, config: SelectionConfig) -> list[float]:
    """[verified members] rewards that the group's advantages are made of.

    Tokens that an environment wrote count towards the length, as they do towards `max_new_tokens`.
    """
    known = [(reward, len(group.response_tokens[i])) for i, reward in enumerate(group.rewards) if reward is not None]
    buffer = config.overlong_buffer
    if buffer is None:
        return [reward for reward, _ in known]
    first = group.max_new_tokens - buffer
    return [reward - min(length - first, buffer) / buffer if length > first else reward for reward, length in known]
