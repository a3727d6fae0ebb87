"""Detects that training has collapsed, and finds the last good version.

    reward       mean of 10 steps below half of the best such mean, if that is 0.1 or more
    entropy      mean of 10 steps below 2 % of the first ten steps', and the reward below 0.75 of its best
    divergence   KL(μ‖π) of a step's tokens above 1 nat in three steps in a row, or no finite number in one

With a constant policy the mean reward of a step of 128 trajectories varies by up to 0.04, and that of ten steps by
0.01, so it does not fall to half by chance. Low entropy alone is not a sign: a policy that has
learned its task is certain.

    version made     57 …   61   62   63   64   65   66   67    the rate is too high from version 61 on,
    sampled by       54 …   58   59   60   61   62   63   64    which the rewards show from step 64 on
    mean of ten    0.58 … 0.62 0.63 0.63 0.63 0.61 0.58 0.53

The reward of a step belongs to the versions that sampled, not to the one that it made. The last good steps are the last
ten that earned 0.9 of the best mean or more; here those up to 66, sampled by versions 54 to 63. The median of the
learning rates that made these versions is the good rate, and the last version made with no more is the last good
version: 60.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose
from statistics import fmean, median_low
from typing import Any

STEPS = 10
"""Steps of each mean."""
_LEAST_BEST, _COLLAPSED, _FALLEN, _GOOD = 0.1, 0.5, 0.75, 0.9
_LEAST_ENTROPY = 0.02
_MOST_KL, _KL_STEPS = 1.0, 3


class CollapseWatch:
    """Watches a run's steps; reports each collapse once, until the reward is back.

    `state` is that of the checkpoint that the trainer starts from, if there is one. A collapse that lasts is reported
    again by each new trainer, so that a trainer that may roll back does.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        values: Mapping[str, Any] = state or {}
        self._rewards: deque[float] = deque(values.get("rewards", []), maxlen=STEPS)
        self._entropies: deque[float] = deque(values.get("entropies", []), maxlen=STEPS)
        self._divergent: int = values.get("divergent", 0)
        self._best: float = values.get("best", 0.0)
        self._first_entropy: float | None = values.get("first_entropy")
        self.is_collapsed = False
        """Whether training has collapsed, and the reward is not back yet."""
        self.is_good = False
        """Whether the last ten steps earned 0.9 of the best mean or more; the best may be long ago, by chance."""

    def state(self) -> dict[str, Any]:
        """Returns JSON for a checkpoint."""
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
        is_full = len(self._rewards) == STEPS
        mean = fmean(self._rewards)
        if is_full:
            self._best = max(self._best, mean)
            if self._first_entropy is None:
                self._first_entropy = fmean(self._entropies)
        self.is_good = is_full and mean >= _GOOD * self._best
        sentence = self._sign(mean, is_full)
        was_collapsed = self.is_collapsed
        self.is_collapsed = sentence is not None or (was_collapsed and mean < _FALLEN * self._best)
        return None if sentence is None or was_collapsed else f"version {version}: {sentence}"

    def _sign(self, mean: float, is_full: bool) -> str | None:
        if self._divergent >= _KL_STEPS:
            return f"KL(μ‖π) was above {_MOST_KL:g} nat per token in {_KL_STEPS} steps in a row"
        if not is_full or self._best < _LEAST_BEST:
            return None
        earned = f"the mean reward of the last {STEPS} steps is {mean:.3f}, and was {self._best:.3f} at its best"
        if mean < _COLLAPSED * self._best:
            return earned
        entropy, first = fmean(self._entropies), self._first_entropy
        if first is not None and entropy < _LEAST_ENTROPY * first and mean < _FALLEN * self._best:
            return f"the policy's entropy is {entropy:.4f} nats per token, and was {first:.4f}; {earned}"
        return None


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """Training has collapsed."""

    sentence: str
    """The sign of the collapse, with the numbers."""
    good_version: int
    """The last version that earned well; 0 if none is known."""
    good_rate: float | None
    """The good learning rate; None if none is known."""
    bad_rate: float
    """Highest learning rate of the steps that collapsed."""

    @property
    def rate_ratio(self) -> float:
        """Good rate ÷ bad rate; 1 if it had not risen, or is not known."""
        if not self.good_rate or self.good_rate >= self.bad_rate:
            return 1.0
        return self.good_rate / self.bad_rate


class LastGood:
    """Follows a run's steps to its last good version. `state` is that of the checkpoint that the trainer starts from.

    Learning rates are those of schedule and rollbacks, without √ESS.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        values: Mapping[str, Any] = state or {}
        self._version: int = values.get("version", 0)
        self._rate: float | None = values.get("rate")
        self._earned_by: deque[int] = deque(values.get("earned_by", []), maxlen=STEPS)
        # (version, rate) pairs in order: each rate made the versions from this one on.
        self._rates = [(int(version), float(rate)) for version, rate in values.get("rates", [])]

    def state(self) -> dict[str, Any]:
        """Returns JSON for a checkpoint."""
        return {
            "version": self._version,
            "rate": self._rate,
            "earned_by": list(self._earned_by),
            "rates": [list(change) for change in self._rates],
        }

    def step(self, version: int, *, earned_by: int, rate: float, is_good: bool) -> None:
        """Takes the step that made `version` with this learning rate, on samples of the version `earned_by`.

        `is_good` says whether the last ten steps are good ones.
        """
        self._earned_by.append(earned_by)
        # A factor that undoes a change of the rate leaves a difference in the last bit.
        if not self._rates or not isclose(rate, self._rates[-1][1]):
            self._rates.append((version, rate))
        oldest = min(self._earned_by)
        self._rates = [(oldest, self._rate_of(oldest)), *(change for change in self._rates if change[0] > oldest)]
        if is_good:
            self._rate = good = median_low(map(self._rate_of, self._earned_by))
            self._version = max(sampler for sampler in self._earned_by if self._rate_of(sampler) <= good)

    def collapse(self, sentence: str, rate: float) -> Collapse:
        """Returns a collapse at this learning rate, or at the highest rate of the last steps."""
        highest = max([rate, *(noted for _, noted in self._rates)])
        return Collapse(sentence=sentence, good_version=self._version, good_rate=self._rate, bad_rate=highest)

    def _rate_of(self, version: int) -> float:
        """Returns the rate that made a version; the first known rate for older versions."""
        return next((rate for since, rate in reversed(self._rates) if since <= version), self._rates[0][1])
