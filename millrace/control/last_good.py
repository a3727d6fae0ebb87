"""The last good version of a run and its learning rate: where a rollback goes.

    version made     57 …   61   62   63   64   65   66   67    the rate is too high from version 61 on,
    sampled by       54 …   58   59   60   61   62   63   64    which the rewards show from step 64 on
    mean of ten    0.58 … 0.62 0.63 0.63 0.63 0.61 0.58 0.53

What a step earned was earned by the versions that sampled, not by the one that it made. The last good steps are the
last ten that earned 0.9 of the best mean or more; here those up to 66, sampled by versions 54 to 63. The middle one of
the learning rates that made these versions is the good rate, and the last of them made with no more is the last good
version: 60.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from millrace.control.collapse import STEPS
from millrace.control.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """Training has collapsed."""

    sentence: str
    """What happened, with the numbers."""
    good_version: int
    """The last good version: a policy from before the collapse; 0 if none is known."""
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
    """Follows a run's steps. `state` is that of the checkpoint that the trainer starts from, if there is one."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        found: Mapping[str, Any] = state or {}
        self._version: int = found.get("version", 0)
        self._rate: float | None = found.get("rate")
        self._earned_by: deque[int] = deque(found.get("earned_by", []), maxlen=STEPS)
        self._rates = Rates(found.get("rates", []))

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {
            "version": self._version,
            "rate": self._rate,
            "earned_by": list(self._earned_by),
            "rates": self._rates.to_json(),
        }

    def step(self, version: int, *, earned_by: int, rate: float, is_good: bool) -> None:
        """Takes the step that made `version` with this learning rate, from what the version `earned_by` sampled.

        `is_good` says whether the last ten steps are good ones.
        """
        self._earned_by.append(earned_by)
        self._rates.note(version, rate)
        self._rates.forget(min(self._earned_by))
        if is_good:
            self._rate = good = median_low(self._rates.of(one) for one in self._earned_by)
            self._version = max(one for one in self._earned_by if self._rates.of(one) <= good)

    def collapse(self, sentence: str, rate: float) -> Collapse:
        """A collapse at this learning rate, or at a higher one of the steps before."""
        return Collapse(
            sentence=sentence,
            good_version=self._version,
            good_rate=self._rate,
            bad_rate=max(rate, self._rates.highest()),
        )
