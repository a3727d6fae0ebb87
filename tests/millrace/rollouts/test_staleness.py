"""The staleness bound, kept by admission alone: a campaign in discrete time, with every delay drawn at random.

generator g:  newest weights (late) ─► group g, g + G, … if admitted ─► some ticks ─► scored (in order)
trainer:      oldest weights first ─► stale or failed? dropped ─► groups_per_step ─► some ticks ─► version + 1
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.rollouts.staleness import admission_limit, staleness

STEPS = 12
TICKS = 20_000
"""Far more than any of these campaigns needs."""


@dataclass(kw_only=True)
class Generator:
    number: int
    """Number of the next group."""
    version: int = 0
    dropped_seen: int = 0
    busy: int = 0
    """Ticks until its current group is done."""
    making: tuple[int, int] | None = None
    """(version, number) of its current group."""
    done: deque[tuple[int, int]] = field(default_factory=deque)


@dataclass
class Campaign:
    max_staleness: int
    groups_per_step: int
    num_generators: int
    failure_rate: float
    seed: int
    keeps: bool = False
    """`staleness.too_old: keep`."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.generators = [Generator(number=g) for g in range(self.num_generators)]
        self.version = 0
        self.training = 0
        self.step: list[tuple[int, int]] = []
        self.admitted = 0
        self.most_outstanding = 0
        self.dropped: Counter[str] = Counter()
        self.lags: list[int] = []
        self.trained: list[int] = []

    def run(self) -> "Campaign":
        for _ in range(TICKS):
            for generator in self.generators:
                self._generate(generator)
            self._train()
            outstanding = self.admitted - self.version * self.groups_per_step - self.dropped.total()
            self.most_outstanding = max(self.most_outstanding, outstanding)
            if self.version == STEPS:
                return self
        raise AssertionError(f"stuck at version {self.version} after {TICKS} ticks")

    def _generate(self, generator: Generator) -> None:
        if generator.making is not None:
            generator.busy -= 1
            if generator.busy <= 0:
                generator.done.append(generator.making)
                generator.making = None
            return
        if self.random.random() < 0.5:
            generator.version, generator.dropped_seen = self.version, self.dropped.total()
        limit = admission_limit(
            generator.version,
            max_staleness=self.max_staleness,
            groups_per_step=self.groups_per_step,
            groups_dropped=generator.dropped_seen,
        )
        if generator.number < limit:
            generator.making = (generator.version, generator.number)
            generator.number += self.num_generators
            generator.busy = self.random.choice((0, 1, 1, 2, 30))
            self.admitted += 1

    def _train(self) -> None:
        if self.training > 0:
            self.training -= 1
            if self.training == 0:
                self.trained += [number for _, number in self.step]
                self.step = []
                self.version += 1
            return
        while len(self.step) < self.groups_per_step:
            fronts = [generator for generator in self.generators if generator.done]
            if not fronts:
                return
            version, number = min(fronts, key=lambda generator: generator.done[0]).done.popleft()
            lag = staleness(self.version, version)
            if lag > self.max_staleness and not self.keeps:
                self.dropped["stale"] += 1
            elif self.random.random() < self.failure_rate:
                self.dropped["error"] += 1
            else:
                self.lags.append(lag)
                self.step.append((version, number))
        self.training = self.random.randint(1, 6)


max_stalenesses, steps_sizes, seeds = st.integers(0, 4), st.integers(1, 5), st.integers(0, 2**32)
generator_counts, failure_rates = st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.5])


def test_staleness_is_the_number_of_steps_since_the_oldest_weights() -> None:
    assert staleness(7, 7) == 0
    assert staleness(7, 4) == 3


def test_each_version_and_each_dropped_group_raises_the_limit() -> None:
    assert admission_limit(0, max_staleness=0, groups_per_step=8, groups_dropped=0) == 8
    assert admission_limit(0, max_staleness=2, groups_per_step=8, groups_dropped=0) == 24
    assert admission_limit(3, max_staleness=2, groups_per_step=8, groups_dropped=0) == 48
    assert admission_limit(3, max_staleness=2, groups_per_step=8, groups_dropped=5) == 53


@settings(deadline=None, max_examples=60)
@given(max_stalenesses, steps_sizes, generator_counts, failure_rates, seeds)
def test_a_bounded_number_of_groups_is_outstanding_and_no_campaign_hangs(
    max_staleness: int, groups_per_step: int, num_generators: int, failure_rate: float, seed: int
) -> None:
    campaign = Campaign(max_staleness, groups_per_step, num_generators, failure_rate, seed).run()
    assert campaign.most_outstanding <= (max_staleness + 1) * groups_per_step
    assert max(campaign.lags) <= max_staleness
    assert len(campaign.trained) == len(set(campaign.trained)) == STEPS * groups_per_step


@settings(deadline=None, max_examples=60)
@given(max_stalenesses, steps_sizes, failure_rates, seeds)
def test_with_one_generator_no_group_is_too_stale(
    max_staleness: int, groups_per_step: int, failure_rate: float, seed: int
) -> None:
    campaign = Campaign(max_staleness, groups_per_step, 1, failure_rate, seed).run()
    assert campaign.dropped["stale"] == 0


@settings(deadline=None, max_examples=60)
@given(max_stalenesses, steps_sizes, generator_counts, seeds)
def test_kept_groups_are_within_the_bound_on_average(
    max_staleness: int, groups_per_step: int, num_generators: int, seed: int
) -> None:
    campaign = Campaign(max_staleness, groups_per_step, num_generators, 0.0, seed, keeps=True).run()
    assert campaign.dropped.total() == 0
    assert campaign.most_outstanding <= (max_staleness + 1) * groups_per_step
    assert sum(campaign.lags) <= max_staleness * len(campaign.lags)


def test_a_kept_straggler_may_be_older_than_the_bound() -> None:
    campaigns = [Campaign(2, 1, 4, 0.0, seed, keeps=True).run() for seed in range(10)]
    assert max(max(campaign.lags) for campaign in campaigns) > 2


@settings(deadline=None, max_examples=60)
@given(steps_sizes, generator_counts, seeds)
def test_without_staleness_generators_are_in_lock_step_with_the_trainer(
    groups_per_step: int, num_generators: int, seed: int
) -> None:
    campaign = Campaign(0, groups_per_step, num_generators, 0.0, seed).run()
    assert campaign.dropped.total() == 0
    assert sorted(campaign.trained) == list(range(STEPS * groups_per_step))


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_staleness_bound_is_reached(max_staleness: int) -> None:
    campaigns = [Campaign(max_staleness, 2, 4, 0.0, seed).run() for seed in range(10)]
    assert max(max(campaign.lags) for campaign in campaigns) == max_staleness
    assert max(campaign.most_outstanding for campaign in campaigns) == (max_staleness + 1) * 2
