"""Whose turn it is: prompts in proportion to their weights, and none twice before the others of its weight.

    weight 1     turn 0     1     2     3     4     5          a prompt asked at turn t is due again at t + 1/weight;
    weight 1/4   turn 0                       4                those due first are asked first, in a drawn order

With equal weights these are epochs: every prompt once per turn. A prompt whose weight changes is due by its new one at
once, and is not asked more often to make up for what it missed.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Turns:
    """At which turn each of `num_prompts` prompts was asked last."""

    def __init__(self, num_prompts: int) -> None:
        self._asked_at = np.full(num_prompts, -np.inf)
        self._now = 0.0

    def next(self, weights: Floats, ranks: Ints, count: int) -> tuple[list[int], list[float]]:
        """The next `count` prompts, and the turn of each.

        `weights`, above 0, and `ranks` are [prompts]. Of those due at the same turn the one of lowest rank is first.
        """
        gaps = 1.0 / weights
        # A prompt that was never asked is due from the beginning.
        due = np.maximum(self._asked_at + gaps, 0.0)
        # Those behind the first `count` can't be reached.
        first = np.lexsort((ranks, due))[:count].tolist()
        waiting = [(float(due[prompt]), int(ranks[prompt]), prompt) for prompt in first]
        prompts, turns, now = [], [], self._now
        for _ in range(count):
            turn, rank, prompt = waiting[0]
            now = max(now, turn)
            prompts.append(prompt)
            turns.append(now)
            heapq.heapreplace(waiting, (now + float(gaps[prompt]), rank, prompt))
        return prompts, turns

    def ask(self, prompts: Sequence[int], turns: Sequence[float]) -> None:
        """Takes note of what `next` gave, here or in another process."""
        self._asked_at[list(prompts)] = turns
        self._now = turns[-1]
