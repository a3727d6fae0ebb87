"""How far a campaign is: its phase, its time, and the speed of its stages. From its status alone."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
"""A trainer counts its tokens once per step, so a rate is averaged over at least so many."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a campaign is doing."""

    name: str
    """In a few words. Once the attempt has ended: its state."""
    detail: str = ""
    """How far it is with that, as the process at work says it, or why the attempt ended so; may be empty."""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


class Rates:
    """Response tokens per second of each stage, as moving averages. `clock` is a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: deque[tuple[float, dict[str, int]]] = deque()

    def look(self, status: dict[str, Any]) -> dict[str, float]:
        """By stage, over the last `RATE_SECONDS` or some steps, whichever is longer. Empty
        for the first `RATE_SECONDS`."""
        now, tokens = self._clock(), status["tokens"]
        window = max(RATE_SECONDS, _STEPS_PER_RATE * (status["step_seconds"] or 0.0))
        self._looks.append((now, tokens))
        # The first that stays is the newest one that is old enough.
        while len(self._looks) > 1 and now - self._looks[1][0] >= window:
            self._looks.popleft()
        since, before = self._looks[0]
        if now - since < RATE_SECONDS:
            return {}
        return {stage: max(0, count - before[stage]) / (now - since) for stage, count in tokens.items()}


def phase(status: dict[str, Any]) -> Phase:
    """What the campaign is doing now."""
    if status["state"] != "running":
        return Phase(name=status["state"], detail=status["cause"] or "")
    # Without what earlier attempts have left.
    doing = {name: what for name, what in status["doing"].items() if name in status["ready"]}
    for name, what in (
        ("promote-0", "deciding on promotion"),
        (f"evaluate-{EVALUATE_AT_END}", "evaluating the trained model"),
    ):
        if doing.get(name, STOPPED) != STOPPED:
            return Phase(name=what, detail=doing[name])
    if "promote-0" in doing:
        return Phase(name="writing the report")
    if "train-0" in doing:
        return _at_work(status, doing)
    if doing.get("bootstrap-0", STOPPED) != STOPPED:
        return Phase(name="making the start model", detail=doing["bootstrap-0"])
    return Phase(name="starting the stages" if doing else "preparing the run")


def _at_work(status: dict[str, Any], doing: dict[str, str]) -> Phase:
    if status["steps"] >= status["stop_at_step"] or status["early_stop"] is not None:
        return Phase(name=DRAINING)
    # The trainer may still be finishing its step. One of the others alone stops when it is started again.
    before_trainer = [what for name, what in doing.items() if name.startswith(("generate-", "score-"))]
    if before_trainer and all(what == STOPPED for what in before_trainer):
        return Phase(name=DRAINING)
    if not status["ready"]["train-0"] and doing["train-0"] != STOPPED:
        return Phase(name=STARTING_TRAINER, detail=doing["train-0"])
    return Phase(name=TRAINING)


def time_line(status: dict[str, Any], rates: dict[str, float]) -> str:
    """How long this attempt has taken, and will still take as far as is known. `rates` are those of `Rates.look`."""
    said = [duration(status["wall_seconds"])]
    if (sampling := _first_step_seconds(status, rates)) is not None and sampling >= _LONG_STEP_SECONDS:
        said.append(f"sampling one step takes about {duration(sampling)}")
    if (seconds := status["step_seconds"]) is not None:
        said.append(f"{seconds:.3g} s per step" if seconds < 100 else f"{seconds:.0f} s per step")
    if (left := status["eta_seconds"]) is not None and phase(status).name == TRAINING:
        said.append(f"about {duration(left)} left")
    return ", ".join(said)


def _first_step_seconds(status: dict[str, Any], rates: dict[str, float]) -> float | None:
    """How long the generators sample for the first step, by their rate so far; None if unknown or it is trained."""
    if status["step_seconds"] is not None or not rates.get("generate") or phase(status).name != TRAINING:
        return None
    generated = status["ledger"]["generated"]
    tokens: float = status["rollouts_per_step"] * generated["tokens"] / generated["rollouts"]
    return tokens / rates["generate"]


def duration(seconds: float) -> str:
    """In its two largest units, such as `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = whole // 60
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // (24 * 60)} d {minutes // 60 % 24} h"
