"""Detects what is wrong with a run although all its stages live: nothing moves, or the reward has collapsed.

status, polled ─┬─► ledger, steps ──no change for stall_seconds──► pipeline.stalled
                └─► reward of the latest step ─► smoothed ──below ½ of the best──► reward.collapsed

Each event is reported once until its cause is over. The caller passes the time.
"""

from collections.abc import Mapping
from typing import Any

from millrace.runs.status import STAGES
from millrace.runtime.messages import LOADING, STARTING, STOPPED, Event

_STEPS_AVERAGED = 10
_LEAST_BEST = 0.1
_COLLAPSED, _RECOVERED = 0.5, 0.75
"""Fractions of the best smoothed reward below which it has collapsed, and above which it has recovered."""

Status = Mapping[str, Any]
"""A status of `millrace.runs.status.StatusReader`. Used: `ledger`, `steps`, `doing`, `reward_mean`."""


class AnomalyDetector:
    """Both detectors of one attempt. `stall_seconds`: how long a run in training may stand still."""

    def __init__(self, *, stall_seconds: float) -> None:
        self._stall = StallDetector(stall_seconds)
        self._collapse = CollapseDetector()

    def look(self, status: Status, now: float) -> list[Event]:
        """New events at `now`, in seconds of any clock. Call it only while the run trains."""
        return [event for event in (self._stall.look(status, now), self._collapse.look(status)) if event is not None]


class StallDetector:
    """Detects that nothing moves: no trajectory generated, scored, trained or dropped, no optimizer step.

    Stages that all send heartbeats may still wait for each other for ever. Time does not count while a stage starts or
    loads its model, for which its supervisor has its own limit, or while one has not started yet or has drained.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts: Mapping[str, Any] | None = None
        self._moved = 0.0
        self._reported = False

    def look(self, status: Status, now: float) -> Event | None:
        """Once per stall: `pipeline.stalled` with what each stage is doing."""
        counts = {"ledger": status["ledger"], "steps": status["steps"]}
        if counts != self._counts or _excused(status["doing"]):
            self._counts, self._moved, self._reported = counts, now, False
            return None
        silent = now - self._moved
        if self._reported or silent < self._seconds:
            return None
        self._reported = True
        return Event(kind="pipeline.stalled", payload={"seconds": round(silent, 1), "doing": dict(status["doing"])})


def _excused(doing: Mapping[str, str]) -> bool:
    return any(
        name.rpartition("-")[0] in STAGES and what in (STARTING, LOADING, STOPPED) for name, what in doing.items()
    )


class CollapseDetector:
    """Detects that the smoothed reward fell below half of its best value.

    Rewards are smoothed by an exponential mean over 10 optimizer steps. With a constant policy, the mean reward of a
    step of 128 trajectories varies by up to 0.04, and smoothed by 0.01, so a best of 0.1 does not fall to half by
    chance. A real collapse is noticed within about 7 steps. The best counts from step 10 on, because the first steps
    may be lucky. A best below 0.1 is ignored: noise could halve it. The mean is weighted by steps, so it does not
    depend on how often `look` is called.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._seen = 0
        self._smoothed = 0.0
        self._best = 0.0
        self._collapsed = False

    def look(self, status: Status) -> Event | None:
        """Once per collapse: `reward.collapsed` with the smoothed reward and its best value."""
        steps, reward = status["steps"], status["reward_mean"]
        if reward is None or steps == self._steps:
            return None
        self._add(reward, steps)
        if self._seen < _STEPS_AVERAGED:
            return None
        self._best = max(self._best, self._smoothed)
        if self._collapsed:
            self._collapsed = self._smoothed < _RECOVERED * self._best
            return None
        self._collapsed = self._best >= _LEAST_BEST and self._smoothed < _COLLAPSED * self._best
        if not self._collapsed:
            return None
        payload = {"reward_mean": round(self._smoothed, 6), "best": round(self._best, 6)}
        return Event(kind="reward.collapsed", payload=payload)

    def _add(self, reward: float, steps: int) -> None:
        """Smooths in the reward of the latest step, once for each step since the last call."""
        # Fewer steps than before: the trainer went back to a checkpoint.
        new = max(1, steps - self._steps) if self._seen else 1
        kept = (1 - 1 / _STEPS_AVERAGED) ** new if self._seen else 0.0
        self._smoothed = kept * self._smoothed + (1 - kept) * reward
        self._steps = steps
        self._seen += new
