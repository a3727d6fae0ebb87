"""Lengths of the groups that runs stored, drawn again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLengths:
    """Each group has the prompt and the responses of one that was stored, drawn with replacement by its number.

    So a long prompt keeps its long responses, and a group that was long as a whole stays so.
    """

    groups: Sequence[tuple[int, Sequence[int]]]
    """Tokens of the prompt and of each response, of every group that may be drawn."""
    group_size: int
    """A group drawn with as many responses keeps them; else they are drawn from it, with replacement."""
    max_tokens: int
    """Longer responses are cut off."""
    seed: int = 0

    def of_group(self, group_id: int) -> tuple[int, Sequence[int]]:
        rng = random.Random(f"{self.seed}:{group_id}")
        prompt, responses = rng.choice(self.groups)
        if len(responses) != self.group_size:
            responses = rng.choices(responses, k=self.group_size)
        return prompt, [min(self.max_tokens, tokens) for tokens in responses]
