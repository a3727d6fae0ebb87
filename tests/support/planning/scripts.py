"""Small runs, scripted: a config, how long everything takes, and how long the responses are."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from configs.schema import RunConfig
from millrace.planning.durations import Costs, Lengths, log_normal_lengths

_FOREVER = 1e9
"""Seconds: no stage of a scripted run is late, or silent."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Settings as in the config; times in seconds."""

    steps: int = 6
    mode: str = "async"
    max_staleness: int = 2
    too_old: str = "drop"
    generators: int = 1
    scorers: int = 1
    groups_per_step: int = 2
    groups_per_batch: int = 2
    group_size: int = 2
    keep_cache: bool = True
    mean_tokens: float = 100.0
    sigma: float = 0.8
    seed: int = 0
    """Of the lengths."""
    token: float = 0.03
    """Per token of a response that is alone in its engine."""
    crowding: float = 0.07
    """What each further request adds to that, as a share."""
    prompt_token: float = 0.0
    """Per token that is computed at once."""
    score: float = 0.11
    train: float = 0.7
    """Of a step without tokens."""
    train_token: float = 0.0013
    handover: float = 0.023
    push: float = 0.31
    pause: float = 0.17
    commit: float = 0.01
    """How long a generator collects finished groups before it commits them."""
    overhead: float = 0.0
    rollout: float = 0.0
    checkpoint: float = 0.0
    checkpoint_every: int = 3

    @property
    def config(self) -> RunConfig:
        """The run's."""
        settings: dict[str, Any] = {
            "pipeline": {"mode": self.mode},
            "training": {
                "max_steps": self.steps,
                "groups_per_step": self.groups_per_step,
                "checkpoint_every": self.checkpoint_every,
            },
            "generation": {
                "replicas": self.generators,
                "groups_per_batch": self.groups_per_batch,
                "group_size": self.group_size,
                "keep_cache": self.keep_cache,
                "max_new_tokens": round(8 * self.mean_tokens),
            },
            "scoring": {"replicas": self.scorers},
            "staleness": {"max_staleness": self.max_staleness, "too_old": self.too_old},
            "storage": {"commit_max_ms": 1000 * self.commit},
            "weights": {"deadline_seconds": _FOREVER},
            "supervision": {"hang_seconds": _FOREVER},
        }
        return RunConfig.model_validate(settings)

    @property
    def costs(self) -> Costs:
        """How long everything takes."""
        return Costs(
            decode=lambda requests, tokens: self.token * (1 + self.crowding * (requests - 1)),
            prefill=lambda tokens: self.prompt_token * tokens,
            score=self.score,
            train=lambda tokens, rollouts: self.train + self.train_token * tokens,
            handover=self.handover,
            push=self.push,
            pause=self.pause,
            checkpoint=self.checkpoint,
            overhead=self.overhead,
            rollout=self.rollout,
        )

    @property
    def lengths(self) -> Lengths:
        """How long the responses are."""
        return log_normal_lengths(
            prompt=5,
            mean=self.mean_tokens,
            sigma=self.sigma,
            max_tokens=round(8 * self.mean_tokens),
            group_size=self.group_size,
            seed=self.seed,
        )


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Any run: bounds, slots below and above a step, short and long tails, every stage the slowest of all."""
    mode = draw(st.sampled_from(["async", "async", "async", "sync"]))
    max_staleness = draw(st.integers(0, 4))
    generators = draw(st.integers(1, 3))
    groups_per_step = generators * draw(st.integers(1, 3))
    # More slots than the bound can fill are refused.
    admitted = groups_per_step * (1 if mode == "sync" else max_staleness + 1)
    return Script(
        mode=mode,
        max_staleness=max_staleness,
        too_old=draw(st.sampled_from(["drop", "wait", "mask", "keep"])),
        generators=generators,
        scorers=draw(st.integers(1, 2)),
        groups_per_step=groups_per_step,
        groups_per_batch=draw(st.integers(1, min(admitted, 2 * groups_per_step))),
        group_size=draw(st.integers(2, 4)),
        mean_tokens=draw(st.sampled_from([8.0, 100.0])),
        sigma=draw(st.floats(0.0, 1.5)),
        seed=draw(st.integers(0, 10**6)),
        token=draw(st.floats(0.005, 0.1)),
        crowding=draw(st.sampled_from([0.0, 0.07, 0.9])),
        prompt_token=draw(st.sampled_from([0.0, 0.002])),
        score=draw(st.floats(0.001, 0.7)),
        train=draw(st.floats(0.1, 9.0)),
        handover=draw(st.floats(0.001, 0.5)),
        push=draw(st.floats(0.001, 6.0)),
        pause=draw(st.floats(0.001, 0.5)),
        commit=draw(st.sampled_from([0.0, 0.01, 0.4])),
        overhead=draw(st.sampled_from([0.0, 0.37])),
        rollout=draw(st.sampled_from([0.0, 0.004])),
        checkpoint=draw(st.sampled_from([0.0, 0.9])),
    )
