"""How far a campaign is, from its status alone: its phase, its time, and the speed of its stages."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from flows.display.tables import duration
from millrace.runtime.arguments import EVALUATE_AT_END
from millrace.runtime.messages import STOPPED

TRAINING = "training"
"""The phase in which all four stages run."""
STARTING_TRAINER = "starting the trainer"
DRAINING = "draining the stages"
RATE_SECONDS = 10.0
"""Least time that a rate is averaged over."""
_LONG_STEP_SECONDS = 60.0
"""A first step that takes at least this long is announced."""
_STEPS_PER_RATE = 3
"""Least steps that a rate is averaged over, because a trainer counts its tokens once per step."""
_AT_THE_END = {"promote-0": "deciding on promotion", f"evaluate-{EVALUATE_AT_END}": "evaluating the trained model"}


class Phase(NamedTuple):
    """A phase of a campaign, or the state in which its attempt has ended."""

    name: str
    detail: str = ""
    """Progress as the process at work reports it, or the cause of the end; may be empty."""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


class Rates:
    """Response tokens per second of each stage, as moving averages. `clock` is a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: deque[tuple[float, dict[str, int]]] = deque()

    def look(self, status: dict[str, Any]) -> dict[str, float]:
        """The rates by stage, over `RATE_SECONDS` or a few steps, whichever is longer. Empty at first."""
        now, tokens = self._clock(), status["tokens"]
        window = max(RATE_SECONDS, _STEPS_PER_RATE * (status["step_seconds"] or 0.0))
        self._looks.append((now, tokens))
        # The first that stays is the newest one that is old enough.
        while len(self._looks) > 1 and now - self._looks[1][0] >= window:
            self._looks.popleft()
        since, earlier = self._looks[0]
        if now - since < RATE_SECONDS:
            return {}
        return {stage: max(0, count - earlier[stage]) / (now - since) for stage, count in tokens.items()}


def phase(status: dict[str, Any]) -> Phase:
    """The campaign's current phase."""
    if status["state"] != "running":
        return Phase(status["state"], status["cause"] or "")
    # Records of processes that this attempt has not started yet are an earlier attempt's.
    doing = {name: activity for name, activity in status["doing"].items() if name in status["ready"]}
    at_work = {name: activity for name, activity in doing.items() if activity != STOPPED}
    for process, name in _AT_THE_END.items():
        if process in at_work:
            return Phase(name, at_work[process])
    if "promote-0" in doing:
        return Phase("writing the report")
    if "train-0" not in doing:
        if "bootstrap-0" in at_work:
            return Phase("making the start model", at_work["bootstrap-0"])
        return Phase("starting the stages" if doing else "preparing the run")
    # One of these alone stops when it is restarted. The trainer may still be finishing its step.
    feeders = [name for name in doing if name.startswith(("generate-", "score-"))]
    drained = bool(feeders) and not any(name in at_work for name in feeders)
    if drained or status["steps"] >= status["stop_at_step"] or status["early_stop"] is not None:
        return Phase(DRAINING)
    if "train-0" in at_work and not status["ready"]["train-0"]:
        return Phase(STARTING_TRAINER, at_work["train-0"])
    return Phase(TRAINING)


def time_line(status: dict[str, Any], rates: dict[str, float]) -> str:
    """How long this attempt has taken, and will still take as far as is known. `rates` are those of `Rates.look`."""
    parts = [duration(status["wall_seconds"])]
    is_training, step_seconds = phase(status).name == TRAINING, status["step_seconds"]
    if step_seconds is not None:
        parts.append(f"{step_seconds:.3g} s per step" if step_seconds < 100 else f"{step_seconds:.0f} s per step")
    elif is_training and rates.get("generate"):
        generated = status["ledger"]["generated"]
        tokens = status["rollouts_per_step"] * generated["tokens"] / generated["rollouts"]
        if (seconds := tokens / rates["generate"]) >= _LONG_STEP_SECONDS:
            parts.append(f"sampling one step takes about {duration(seconds)}")
    if is_training and status["eta_seconds"] is not None:
        parts.append(f"about {duration(status['eta_seconds'])} left")
    return ", ".join(parts)
