"""The components of a step's rewards as metrics."""

import json
import math
from collections.abc import Sequence

from millrace.rollouts.scored_group import ScoredGroup

REWARD_COMPONENT = "reward_component/"
"""Prefix of the metrics; the component's name follows."""
MOST_COMPONENTS = 16
"""Metrics per step: a reward may name its components freely, and each name is a separate series."""
_LONGEST_NAME = 80


def component_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean of each component over the responses that have it, by the metric's name.

    Of more than `MOST_COMPONENTS`, the first by name. Infinite and NaN values, and names of more than 80 characters,
    are left out.
    """
    values: dict[str, list[float]] = {}
    for components in (json.loads(text) for group in groups for text in group.components):
        for name, value in components.items():
            if math.isfinite(value) and len(name) <= _LONGEST_NAME:
                values.setdefault(name, []).append(value)
    names = sorted(values)[:MOST_COMPONENTS]
    return {f"{REWARD_COMPONENT}{name}": sum(values[name]) / len(values[name]) for name in names}
