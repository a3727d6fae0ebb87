"""How much a group weighs by where its prompt is from: `training.selection.source_factors`."""

import json
from collections.abc import Mapping

from millrace.prompts.packages import PromptSource
from millrace.rollouts.scored_group import ScoredGroup


def source_factor(group: ScoredGroup, factors: Mapping[str, float]) -> float:
    """The factor of the group's advantages, by the task that its prompt is from; 1 if there is none for that task."""
    if not factors:
        return 1.0
    try:
        task = PromptSource.parse(json.loads(group.meta)["source"]).name
    except ValueError:
        # No package made the prompt, as in a replay of a run with other prompts.
        return 1.0
    return factors.get(task, 1.0)
