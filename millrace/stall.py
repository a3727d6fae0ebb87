"""What is wrong with a run although all its stages live: nothing moves, or the reward has collapsed.

status, look by look ─┬─► ledger, steps: did anything change? ──not for so long──► pipeline.stalled      once, until
                      └─► reward of the latest step ─► smoothed ──below ½ best──► reward.collapsed      it is over

There is no clock here: whoever looks says when.
"""

from collections.abc import Mapping
from typing import Any

from millrace.events import LOADING, STARTING, STOPPED, Event
from millrace.status import STAGES

_STEPS_AVERAGED = 10
_LEAST_BEST = 0.1
_COLLAPSED, _RECOVERED = 0.5, 0.75
"""Of the best smoothed reward: below the one it has collapsed, above the other it is well again."""

Status = Mapping[str, Any]
"""A look of `millrace.status.StatusReader`. Looked at: `ledger`, `steps`, `doing`, `reward_mean`."""


class Trouble:
    """Both watches of one attempt. `stall_seconds`: how long nothing may move while the run trains."""

    def __init__(self, *, stall_seconds: float) -> None:
        self._stall = StallWatch(stall_seconds)
        self._collapse = CollapseWatch()

    def look(self, status: Status, now: float) -> list[Event]:
        """What is to be told of at `now`, in seconds of any clock. Call it while the run trains, and only then."""
        return [event for event in (self._stall.look(status, now), self._collapse.look(status)) if event is not None]


class StallWatch:
    """Whether anything moves: a rollout generated, scored, trained or dropped, an optimizer step.

    Each stage may be well and beat, and wait for another for ever. A stage that starts or loads its model is excused:
    its supervisor gives it a time of its own for that. So is one that has not been started yet, or has drained.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts: Mapping[str, Any] | None = None
        self._moved = 0.0
        self._told = False

    def look(self, status: Status, now: float) -> Event | None:
        """Once for each stall, `pipeline.stalled` with what each stage is doing."""
        counts = {"ledger": status["ledger"], "steps": status["steps"]}
        if counts != self._counts or _excused(status["doing"]):
            self._counts, self._moved, self._told = counts, now, False
            return None
        silent = now - self._moved
        if self._told or silent < self._seconds:
            return None
        self._told = True
        return Event(kind="pipeline.stalled", payload={"seconds": round(silent, 1), "doing": dict(status["doing"])})


def _excused(doing: Mapping[str, str]) -> bool:
    return any(
        name.rpartition("-")[0] in STAGES and what in (STARTING, LOADING, STOPPED) for name, what in doing.items()
    )


class CollapseWatch:
    """Whether the reward fell below half of the best it had, both smoothed.

    Smoothed by an exponential mean over 10 optimizer steps. The mean reward of one step of 128 rollouts varies by up to
    0.04 though the policy stays as it is; of that the smoothing leaves 0.01, so that half of a best of 0.1 is not met
    by chance. A real collapse is noticed within about 7 steps. Nothing counts as best before 10 steps are in, or a
    lucky first step would be the measure. Weighted by steps, not by looks: it does not depend on how often one looks.
    A best below 0.1 is never spoken of: half of so little is lost by chance, and of 0 or less there is no half.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._seen = 0
        self._smoothed = 0.0
        self._best = 0.0
        self._collapsed = False

    def look(self, status: Status) -> Event | None:
        """Once for each collapse, `reward.collapsed` with the smoothed reward and the best of it."""
        steps, reward = status["steps"], status["reward_mean"]
        if reward is None or steps == self._steps:
            return None
        self._take(reward, steps)
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

    def _take(self, reward: float, steps: int) -> None:
        """The reward of the latest of the steps since the last look, which stands for all of them."""
        # Fewer than before: the trainer went back to a checkpoint.
        new = max(1, steps - self._steps) if self._seen else 1
        kept = (1 - 1 / _STEPS_AVERAGED) ** new if self._seen else 0.0
        self._smoothed = kept * self._smoothed + (1 - kept) * reward
        self._steps = steps
        self._seen += new
