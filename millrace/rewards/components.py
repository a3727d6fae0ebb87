"""The components of the rewards of a step, as metrics: one for each name."""

import json
import math
from collections.abc import Sequence

from millrace.rollouts.scored_group import ScoredGroup

REWARD_COMPONENT = "reward_component/"
"""Prefix of the metrics; the component's name follows."""
MOST_COMPONENTS = 16
"""Metrics per step: a reward may name what it likes, and each name is a series of its own."""
_MOST_CHARACTERS = 80


def component_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """The mean of each component over the responses that have it, as metrics by name.

    Of more than `MOST_COMPONENTS`, the first by name. Values that are not finite, and names of more than 80 characters,
    are left out.
    """
    sums: dict[str, tuple[float, int]] = {}
    for group in groups:
        for text in group.components:
            for name, value in json.loads(text).items():
                if math.isfinite(value):
                    total, count = sums.get(name, (0.0, 0))
                    sums[name] = total + value, count + 1
    names = sorted(name for name in sums if len(name) <= _MOST_CHARACTERS)[:MOST_COMPONENTS]
    return {f"{REWARD_COMPONENT}{name}": sums[name][0] / sums[name][1] for name in names}
