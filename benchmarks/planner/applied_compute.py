"""Mean staleness in real training runs, as Applied Compute measured it (July 2026), and what the simulation gives.

Their stack and ours differ in what holds generators back. Theirs fills a queue of q batches and waits when it is full.
Ours admits a group while at most η + 1 batches are on their way: in flight, queued or in training. With C groups in
flight, η = C / B + q, rounded up, lets as much be on its way. Their groups are whole tasks, and a place belongs to one.

M is the mean length of the longest response of a group over the mean length of a response. It gives σ of log-normal
lengths for groups of 8, which is assumed.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from configs.schema import RunConfig
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import LogNormalLengths
from millrace.planning.simulation.simulate import simulate

_GROUP_SIZE = 8
_MEAN = 1000.0
_STEPS, _WARMUP = 150, 50


@dataclass(frozen=True)
class StalenessRow:
    """One of their runs."""

    concurrency: int
    """C, groups in flight."""
    batch: int
    """B, groups per step."""
    queue: int
    """q, the most that the queue holds, batches."""
    speed: float
    """ρ, groups per second that generators could make over those that the trainer could train."""
    tail: float
    """M."""
    measured: float
    """Mean staleness."""

    @property
    def bound(self) -> int:
        """η with which as much is on its way here."""
        return math.ceil(self.concurrency / self.batch) + self.queue

    @property
    def formula(self) -> float:
        """What their closed form gives."""
        in_flight = self.concurrency * self.tail / self.batch
        if self.speed <= 1:
            return in_flight + self.speed
        return in_flight / self.speed + (2 * self.queue + self.speed - 1) / (2 * self.speed)

    def predicted(self) -> float:
        """By the simulation."""
        config = RunConfig.model_validate(
            {
                "generation": {
                    "group_size": _GROUP_SIZE,
                    "groups_per_batch": self.concurrency,
                    "max_new_tokens": 16_000,
                },
                "training": {"max_steps": _STEPS, "groups_per_step": self.batch},
                "staleness": {"max_staleness": self.bound},
            }
        )
        lengths = LogNormalLengths(
            prompt_tokens=1,
            mean_tokens=_MEAN,
            sigma=_sigma(self.tail),
            max_tokens=16_000,
            group_size=_GROUP_SIZE,
        )
        # Generators alone make a step in `batch / concurrency` mean lengths, each token taking one second.
        generation = self.batch * _MEAN / self.concurrency
        costs = Costs(
            decode=lambda running, tokens: 1.0,
            prefill=lambda tokens: 0.0,
            score=0.0,
            train=lambda tokens, rollouts: generation * self.speed,
            handover=0.0,
            push=0.0,
            pause=0.0,
            checkpoint=0.0,
        )
        return simulate(config, costs, lengths, steps=_STEPS, warmup=_WARMUP).staleness_mean


@lru_cache
def _sigma(tail: float) -> float:
    """σ with which the longest of a group is `tail` times the mean, on average."""
    normal = np.random.default_rng(0).standard_normal((20_000, _GROUP_SIZE))
    low, high = 0.0, 2.0
    for _ in range(40):
        sigma = (low + high) / 2
        lengths = np.exp(sigma * normal)
        found = lengths.max(axis=1).mean() / lengths.mean()
        low, high = (sigma, high) if found < tail else (low, sigma)
    return high


ROWS = (
    StalenessRow(120, 240, 2, 0.63, 1.42, 1.26),
    StalenessRow(240, 120, 2, 0.92, 1.43, 3.59),
    StalenessRow(128, 128, 2, 1.07, 1.44, 3.09),
    StalenessRow(240, 120, 1, 0.86, 1.42, 3.40),
    StalenessRow(120, 120, 1, 0.67, 1.42, 1.92),
    StalenessRow(128, 128, 1, 1.14, 1.45, 2.01),
)
"""In the order of their table."""
