"""Figures of two runs, and of several pairs of them."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from benchmarks.trl.runs import Step
from benchmarks.trl.shapes import Shape

Figures = dict[str, Any]

SPEEDUP = 2.0
"""Target: TRL's seconds per step over Millrace's."""
REWARD_MARGIN = 0.05
"""Rewards this far apart count as equal. The mean over a quarter of a run varies by about half of it between seeds."""
_LAST_SHARE = 0.25
"""Share of a run's steps over which rewards are averaged."""


def of_run(steps: Sequence[Step], shape: Shape, warmup: int) -> Figures:
    """Speed after the first `warmup` steps, and the mean reward of the last quarter of the steps."""
    timed = steps[warmup:]
    seconds = steps[-1].t - steps[warmup - 1].t
    tokens = sum(shape.responses * (shape.prompt_tokens + step.response_tokens) for step in timed)
    return {
        "seconds_per_step": seconds / len(timed),
        "tokens_per_second": tokens / seconds,
        "response_tokens": fmean(step.response_tokens for step in timed),
        "reward_first": steps[0].reward,
        "reward_last": _reward(steps, len(steps)),
        "steps": [asdict(step) for step in steps],
    }


def of_pair(trl: Sequence[Step], millrace: Sequence[Step], shape: Shape, warmup: int) -> Figures:
    """Both runs, the speed-up, and the rewards after the time in which the faster one ended, from its first step on."""
    seconds = min(steps[-1].t - steps[0].t for steps in (trl, millrace))
    runs = {"trl": of_run(trl, shape, warmup), "millrace": of_run(millrace, shape, warmup)}
    for name, steps in (("trl", trl), ("millrace", millrace)):
        runs[name]["reward_after_equal_time"] = _reward(steps, sum(step.t - steps[0].t <= seconds for step in steps))
    return {
        **runs,
        "equal_seconds": seconds,
        "speedup": runs["trl"]["seconds_per_step"] / runs["millrace"]["seconds_per_step"],
        "tokens_speedup": runs["millrace"]["tokens_per_second"] / runs["trl"]["tokens_per_second"],
    }


def of_pairs(pairs: Sequence[Figures]) -> Figures:
    """Medians over the pairs, and the pairs themselves."""
    sides = {
        side: {name: median(pair[side][name] for pair in pairs) for name in pairs[0][side] if name != "steps"}
        for side in ("trl", "millrace")
    }
    return {
        **sides,
        "speedup": median(pair["speedup"] for pair in pairs),
        "tokens_speedup": median(pair["tokens_speedup"] for pair in pairs),
        "pairs": list(pairs),
    }


def targets_met(shapes: dict[str, Figures]) -> dict[str, bool]:
    """By the text of the target."""
    targets = {}
    for name, found in shapes.items():
        rewards = [found[side]["reward_last"] for side in ("millrace", "trl")]
        targets[f"{name}: {found['speedup']:.2f} × TRL's speed, at least {SPEEDUP:.0f} ×"] = found["speedup"] >= SPEEDUP
        targets[f"{name}: reward {rewards[0]:.3f} after as many steps, TRL's {rewards[1]:.3f}"] = (
            rewards[0] >= rewards[1] - REWARD_MARGIN
        )
    return targets


def _reward(steps: Sequence[Step], end: int) -> float:
    """Mean over a window of steps that ends before step `end`; the window is a share of the whole run."""
    window = max(1, round(len(steps) * _LAST_SHARE))
    return fmean(step.reward for step in steps[max(0, end - window) : end])
