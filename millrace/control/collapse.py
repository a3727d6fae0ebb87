"""Detects that training has collapsed, and remembers the last good version.

    reward       mean of 10 steps below half of the best such mean, if that is 0.1 or more
    entropy      mean of 10 steps below 2 % of the first ten steps', and the reward below 0.75 of its best
    divergence   KL(μ‖π) of a step's tokens above 1 nat in three steps in a row, or no finite number in one

With a constant policy the mean reward of a step of 128 trajectories varies by up to 0.04, and that of ten steps by
0.01, so it does not fall to half by chance. Low entropy alone is not a sign: a policy that has learned its task is
certain.

The reward of a step belongs to the version that sampled, not to the one that the step made. The last good version is
the one that sampled the last step whose ten steps earned 0.9 of the best mean or more. The good learning rate is the
lowest of these ten steps: a rate that is too high shows in the rewards some steps later.
"""

from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

STEPS = 10
"""Steps of each mean."""
_LEAST_BEST, _COLLAPSED, _FALLEN, _GOOD = 0.1, 0.5, 0.75, 0.9
_LEAST_ENTROPY = 0.02
_MOST_KL, _KL_STEPS = 1.0, 3


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
    """Learning rate of the step that collapsed."""

    @property
    def rate_ratio(self) -> float:
        """Good rate ÷ bad rate; 1 if it had not risen, or is not known."""
        return min(1.0, self.good_rate / self.bad_rate) if self.good_rate and self.bad_rate else 1.0


@dataclass(kw_only=True)
class CollapseWatch:
    """Watches a run's steps; reports each collapse once, until the reward is back.

    A collapse that lasts is reported again by each new trainer, so that a trainer that may roll back does.
    """

    rewards: list[float] = field(default_factory=list)
    """Of the last ten steps, as entropies and rates."""
    entropies: list[float] = field(default_factory=list)
    divergent: int = 0
    """Last steps in a row whose KL(μ‖π) was too high."""
    best: float = 0.0
    """Best mean reward."""
    first_entropy: float | None = None
    rates: list[float] = field(default_factory=list)
    """Learning rates of schedule and rollbacks, without √ESS."""
    good_version: int = 0
    good_rate: float | None = None

    def __post_init__(self) -> None:
        self.is_collapsed = False
        """Whether training has collapsed, and the reward is not back yet."""

    def state(self) -> dict[str, Any]:
        """Returns JSON for a checkpoint: the arguments of an equal watch."""
        return asdict(self)

    def step(
        self,
        version: int,
        *,
        reward: float,
        entropy: float,
        mismatch_kl: float,
        earned_by: int = 0,
        rate: float = 0.0,
    ) -> str | None:
        """Takes the means of the step that made `version`: reward, entropy and KL(μ‖π) in nats per token.

        `earned_by` is the version that sampled, and `rate` the learning rate. Returns a sentence, with the numbers, if
        training has collapsed.
        """
        self.rewards = [*self.rewards, reward][-STEPS:]
        self.entropies = [*self.entropies, entropy][-STEPS:]
        self.rates = [*self.rates, rate][-STEPS:]
        self.divergent = self.divergent + 1 if not mismatch_kl <= _MOST_KL else 0
        is_full = len(self.rewards) == STEPS
        mean = fmean(self.rewards)
        if is_full:
            self.best = max(self.best, mean)
            if self.first_entropy is None:
                self.first_entropy = fmean(self.entropies)
        if is_full and mean >= _GOOD * self.best:
            self.good_version, self.good_rate = earned_by, min(self.rates)
        sentence = self._sign(mean, is_full)
        was_collapsed = self.is_collapsed
        self.is_collapsed = sentence is not None or (was_collapsed and mean < _FALLEN * self.best)
        return None if sentence is None or was_collapsed else f"version {version}: {sentence}"

    def collapse(self, sentence: str, rate: float) -> Collapse:
        """Returns a collapse at this learning rate."""
        return Collapse(sentence=sentence, good_version=self.good_version, good_rate=self.good_rate, bad_rate=rate)

    def _sign(self, mean: float, is_full: bool) -> str | None:
        if self.divergent >= _KL_STEPS:
            return f"KL(μ‖π) was above {_MOST_KL:g} nat per token in {_KL_STEPS} steps in a row"
        if not is_full or self.best < _LEAST_BEST:
            return None
        earned = f"the mean reward of the last {STEPS} steps is {mean:.3f}, and was {self.best:.3f} at its best"
        if mean < _COLLAPSED * self.best:
            return earned
        entropy, first = fmean(self.entropies), self.first_entropy
        if first is not None and entropy < _LEAST_ENTROPY * first and mean < _FALLEN * self.best:
            return f"the policy's entropy is {entropy:.4f} nats per token, and was {first:.4f}; {earned}"
        return None
