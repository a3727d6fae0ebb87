"""Shares of trained groups where one source's groups take ten times as long as those of others, in virtual time.

Admission, the mixture and what the trainer does with groups that are too old are the product's; engine, scorer and
optimizer are delays.
"""

import heapq
from collections import Counter

import numpy as np
import pytest
from support.streams.scored_groups import scored_group

from configs.sources import SourceConfig
from configs.task import PromptsConfig
from millrace.prompts.mixture import MixedSource, Mixture
from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.masking import mask_too_old
from millrace.rollouts.scored_group import ScoredGroup
from millrace.rollouts.staleness import admission_limit, consumption_order, is_too_old, step_leaves_too_old
from millrace.types import Prompt
from storage.stores.memory import MemoryStore

PER_STEP, BOUND, SLOTS, STEPS = 8, 2, 32, 300
TICKS = {"fast": 1, "quick": 2, "slow": 20}
"""Time that a group takes; a step takes three ticks."""


class Pipeline:
    """One generator and a trainer that treats groups beyond the bound as `too_old` says."""

    def __init__(self, store: MemoryStore, too_old: str, weights: dict[str, float]) -> None:
        prompts = [Prompt(prompt_id=str(number), text="1+1=", answer="2", source="test") for number in range(5)]
        sources = {
            name: MixedSource(prompts=prompts, config=PromptsConfig(), mixing=SourceConfig(weight=weight), seed=0)
            for name, weight in weights.items()
        }
        self.mixture = Mixture(store, sources, seed=0, block_groups=(BOUND + 1) * PER_STEP)
        self.mixture.switch_lineage(Lineage(0, {}), -1)
        self.consumed, self.too_old = ConsumedWriter(store, incarnation=0), too_old
        self.tick = self.version = self.next_group = self.num_dropped = self.busy_until = 0
        # Group → tick at which it is done, and the version at each tick of its generation.
        self.in_flight: dict[int, tuple[int, list[int]]] = {}
        self.ready: list[tuple[tuple[int, int], ScoredGroup]] = []
        self.batch: list[ScoredGroup] = []
        self.outcomes = Counter[tuple[str, str]]()

    def run(self) -> None:
        while self.version < STEPS:
            self.generate()
            if self.tick >= self.busy_until and not self.waits_for_stragglers() and self.collect():
                self.step()
            self.tick += 1

    def generate(self) -> None:
        limits = {"max_staleness": BOUND, "groups_per_step": PER_STEP, "groups_dropped": self.num_dropped}
        while len(self.in_flight) < SLOTS and self.next_group < admission_limit(self.version, **limits):
            self.mixture.decide(self.next_group, self.version)
            source, _ = self.mixture.prompt_at(self.next_group)
            self.in_flight[self.next_group] = (self.tick + TICKS[source], [])
            self.next_group += 1
        for number, (done, versions) in list(self.in_flight.items()):
            versions.append(self.version)
            if self.tick >= done:
                del self.in_flight[number]
                source, _ = self.mixture.prompt_at(number)
                group = scored_group(number, [versions, versions], [1.0, 0.0], source=source)
                heapq.heappush(self.ready, (consumption_order(group.min_policy_version, number), group))

    def waits_for_stragglers(self) -> bool:
        oldest = min((versions[0] for _, versions in self.in_flight.values()), default=self.version)
        return self.too_old == "wait" and step_leaves_too_old(oldest, self.version, BOUND)

    def collect(self) -> bool:
        while self.ready and len(self.batch) < PER_STEP:
            _, group = heapq.heappop(self.ready)
            if self.too_old == "mask":
                group = mask_too_old(group, self.version, BOUND)
            if self.too_old != "keep" and is_too_old(group.oldest_version, self.version, BOUND):
                self.consumed.drop(group, "stale", self.version)
                self.num_dropped += 1
                self.outcomes[group.source, "stale"] += 1
            else:
                self.batch.append(group)
        return len(self.batch) == PER_STEP

    def step(self) -> None:
        self.version += 1
        self.busy_until = self.tick + 3
        members = [group.response_tokens[i] for group in self.batch for i in group.trained]
        values = [np.zeros(len(tokens), np.float32) for tokens in members]
        self.consumed.step(self.version, self.batch, [0.0] * len(members), values, values)
        self.consumed.flush()
        self.outcomes.update((group.source, "trained") for group in self.batch)
        self.batch = []


@pytest.mark.slow
@pytest.mark.parametrize("too_old", ["mask", "drop", "wait", "keep"])
def test_a_slow_source_is_trained_by_its_weight(memory_store: MemoryStore, too_old: str) -> None:
    weights = {"fast": 0.3, "quick": 0.2, "slow": 0.5}
    pipeline = Pipeline(memory_store, too_old, weights)
    pipeline.run()
    shares = {name: pipeline.outcomes[name, "trained"] / (STEPS * PER_STEP) for name in weights}
    assert shares == pytest.approx(weights, abs=0.01)
    if too_old == "drop":
        assert pipeline.outcomes["slow", "stale"] > 100, "witness: many of its groups are too old"
