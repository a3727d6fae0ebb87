"""When training has collapsed: the policy earns far less than it did, or is far from the one that sampled.

    reward       mean of 10 steps below half of the best such mean, if that is 0.1 or more
    entropy      mean of 10 steps below 2 % of the first ten steps', and the reward below 0.75 of its best
    divergence   KL(μ‖π) of a step's tokens above 1 nat in three steps in a row, or no finite number in one

With a constant policy the mean reward of a step of 128 trajectories varies by up to 0.04, and that of ten steps by
0.01, so it does not fall to half by chance. Entropy alone is no sign: a policy that has learned its task is certain.
"""

from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

STEPS = 10
"""Steps of each mean."""
_LEAST_BEST, _COLLAPSED, _FALLEN, _GOOD = 0.1, 0.5, 0.75, 0.9
_LEAST_ENTROPY = 0.02
_MOST_KL, _KL_STEPS = 1.0, 3


class CollapseWatch:
    """Watches a run's steps; tells of each collapse once, until the reward is back.

    `state` is that of the checkpoint that the trainer starts from, if there is one: what was measured before counts. A
    collapse that lasts is told of again by each new trainer, so that one which may go back does.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        found: Mapping[str, Any] = state or {}
        self._rewards: deque[float] = deque(found.get("rewards", []), maxlen=STEPS)
        self._entropies: deque[float] = deque(found.get("entropies", []), maxlen=STEPS)
        self._divergent: int = found.get("divergent", 0)
        self._best: float = found.get("best", 0.0)
        self._first_entropy: float | None = found.get("first_entropy")
        self.is_collapsed = False
        """Whether training has collapsed, and the reward is not back yet."""
        self.is_good = False
        """Whether the last ten steps earned 0.9 of the best mean or more; the best may be long ago, by chance."""

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {
            "rewards": list(self._rewards),
            "entropies": list(self._entropies),
            "divergent": self._divergent,
            "best": self._best,
            "first_entropy": self._first_entropy,
        }

    def step(self, version: int, *, reward: float, entropy: float, mismatch_kl: float) -> str | None:
        """Takes the means of the step that made `version`: reward, entropy and KL(μ‖π) in nats per token.

        Returns a sentence, with the numbers, if training has collapsed.
        """
        self._rewards.append(reward)
        self._entropies.append(entropy)
        self._divergent = self._divergent + 1 if not mismatch_kl <= _MOST_KL else 0
        full = len(self._rewards) == STEPS
        mean = fmean(self._rewards)
        if full and self._first_entropy is None:
            self._first_entropy = fmean(self._entropies)
        if full:
            self._best = max(self._best, mean)
        self.is_good = full and mean >= _GOOD * self._best
        sentence = self._sentence(mean, full)
        if sentence is None:
            self.is_collapsed = self.is_collapsed and mean < _FALLEN * self._best
            return None
        if self.is_collapsed:
            return None
        self.is_collapsed = True
        return f"version {version}: {sentence}"

    def _sentence(self, mean: float, full: bool) -> str | None:
        if self._divergent >= _KL_STEPS:
            return f"KL(μ‖π) was above {_MOST_KL:g} nat per token in {_KL_STEPS} steps in a row"
        if not full or self._best < _LEAST_BEST:
            return None
        if mean < _COLLAPSED * self._best:
            return f"the mean reward of the last {STEPS} steps is {mean:.3f}, and was {self._best:.3f} at its best"
        entropy, first = fmean(self._entropies), self._first_entropy
        if first is not None and entropy < _LEAST_ENTROPY * first and mean < _FALLEN * self._best:
            return (
                f"the policy's entropy is {entropy:.4f} nats per token, and was {first:.4f}; the mean reward of the "
                f"last {STEPS} steps is {mean:.3f}, and was {self._best:.3f} at its best"
            )
        return None
