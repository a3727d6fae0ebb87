"""The rule that moves bound and places, on runs of known behaviour and on thousands of random ones."""

import itertools
import random
from dataclasses import dataclass, field

import pytest

from millrace.control.rule import Decision, Limits, Reading, Rule

LIMITS = Limits(min_staleness=1, max_staleness=8, group_size=8, max_places=128, ess_target=0.95, ess_floor=0.5)


@dataclass(kw_only=True)
class Plant:
    """A run in steady state: what its steps measure under a bound and a number of places."""

    train: float = 1.0
    """Seconds of a step's training."""
    generate: float = 0.5
    """Seconds that one step's groups take a generator with all places."""
    enough: int = 2
    """Bound from which on generation and training overlap wholly."""
    drift: float = 0.001
    """1 − ESS at a bound of 1; it grows with the square of the bound."""
    cuts_below: int = 0
    """Bound below which long responses lose tokens."""
    noise: random.Random = field(default_factory=lambda: random.Random(0))
    waited: float = 0.0
    seconds: float = 0.0
    idle: float = 0.0
    generating: float = 0.0

    def step_seconds(self, bound: int, places: int) -> float:
        generate = self.generate * (LIMITS.max_places / places) ** 0.5
        overlap = min(1.0, bound / self.enough)
        return max(self.train, generate) + (1 - overlap) * min(self.train, generate)

    def step(self, bound: int, places: int) -> Reading:
        generate = self.generate * (LIMITS.max_places / places) ** 0.5
        step = self.step_seconds(bound, places)
        jitter = self.noise.uniform(0.95, 1.05)
        self.seconds += step * jitter
        self.waited += max(0.0, step - self.train) * jitter
        self.generating += step * jitter
        self.idle += max(0.0, step - generate) * jitter
        behind = max(0, bound - self.enough) if generate < self.train else 0
        return Reading(
            effective_sample_size=max(0.01, 1 - self.drift * bound**2 * self.noise.uniform(0.9, 1.1)),
            length_ratio=0.9 if bound < self.cuts_below else 1.0,
            steps_ready=behind,
            trainer_waited=self.waited,
            trainer_seconds=self.seconds,
            generators_waited=self.idle,
            generators_seconds=self.generating,
        )


def played(plant: Plant, steps: int, rule: Rule | None = None, first: int = 1) -> tuple[Rule, list[Decision]]:
    """The rule after so many steps of the plant, and what it decided."""
    rule, found = rule or Rule.start(LIMITS), []
    for version in range(first, first + steps):
        decision = rule.step(plant.step(rule.max_staleness, rule.places), version)
        assert LIMITS.min_staleness <= rule.max_staleness <= LIMITS.max_staleness
        assert LIMITS.group_size <= rule.places <= LIMITS.max_places
        if decision is not None:
            found.append(decision)
    return rule, found


def test_the_bound_rises_until_the_trainer_no_longer_waits_and_stays_there() -> None:
    _, decisions = played(Plant(generate=0.9, enough=3), 100)
    # Doubled twice from 1. One more than it needs costs nothing: 1 − 0.001 · 16 is well above 0.95.
    assert [one.max_staleness for one in decisions] == [2, 4]
    assert decisions[0].reason.startswith("the trainer waits ")


def test_a_bound_above_the_one_that_is_needed_falls_to_it_when_the_effective_sample_size_is_scarce() -> None:
    rule = Rule.start(LIMITS)
    rule.max_staleness = 5
    rule, decisions = played(Plant(generate=0.9, enough=3, drift=0.0018), 200, rule)
    assert rule.max_staleness == 3, "at 3 no whole step lies ready"
    assert {one.action for one in decisions} == {"lower"}


def test_a_bound_falls_no_further_than_the_effective_sample_size_asks_for() -> None:
    rule = Rule.start(LIMITS)
    rule.max_staleness = 8
    rule, _ = played(Plant(enough=1, drift=0.0006), 200, rule)
    assert rule.max_staleness == 6, "1 − 0.0006 · 36 lacks less than half of 1 − 0.95, and with 49 more"


def test_room_is_kept_when_the_effective_sample_size_allows_it() -> None:
    rule = Rule.start(LIMITS)
    rule.max_staleness = 8
    _, decisions = played(Plant(generate=0.2, enough=1, drift=1e-4), 200, rule)
    assert decisions == []


def test_an_effective_sample_size_below_its_target_halves_the_bound() -> None:
    rule = Rule.start(LIMITS)
    rule.max_staleness = 8
    rule, decisions = played(Plant(enough=8, drift=0.002), 20, rule)
    assert decisions[0].action == "halve"
    assert decisions[0].max_staleness == 4
    assert "below the target of 0.95" in decisions[0].reason


def test_a_bound_that_would_cost_too_much_of_the_effective_sample_size_is_not_chosen() -> None:
    rule, _ = played(Plant(generate=0.9, enough=8, drift=0.005), 200)
    assert rule.max_staleness == 3, "1 − 0.005 · 9 is above 0.95, and 1 − 0.005 · 16 is below"


def test_three_steps_below_the_floor_bring_the_bound_down_at_once() -> None:
    rule = Rule.start(LIMITS)
    rule.max_staleness = 8
    rule, decisions = played(Plant(drift=0.01), 3, rule)
    assert [one.action for one in decisions] == ["floor"]
    assert rule.max_staleness == LIMITS.min_staleness


def test_long_responses_that_lose_tokens_raise_the_bound() -> None:
    rule, _ = played(Plant(enough=1, cuts_below=4), 100)
    assert rule.max_staleness == 4


def test_generators_with_too_many_places_get_fewer_and_have_them_back_when_they_slow_down() -> None:
    plant = Plant(generate=0.2, enough=1, drift=0.035)
    rule, decisions = played(plant, 60)
    assert rule.places < LIMITS.max_places
    assert plant.step_seconds(rule.max_staleness, rule.places) == plant.train, "the trainer does not wait for it"
    plant.generate = 0.95
    rule, _ = played(plant, 300, rule, first=61)
    assert plant.step_seconds(rule.max_staleness, rule.places) <= 1.05 * plant.train
    assert decisions


def test_places_that_were_too_few_are_left_alone_for_twice_as_long_each_time() -> None:
    rule = Rule.start(LIMITS)
    waited = idle = 0.0
    cuts = []
    # Generators that idle with all places, and hold the trainer up with any fewer.
    for version in range(1, 1000):
        few = rule.places < LIMITS.max_places
        waited, idle = waited + 0.2 * few, idle + 0.5 * (not few)
        reading = Reading(
            effective_sample_size=0.96,
            length_ratio=1.0,
            steps_ready=0.0,
            trainer_waited=waited,
            trainer_seconds=version,
            generators_waited=idle,
            generators_seconds=version,
        )
        before = rule.places
        if rule.step(reading, version) is not None and rule.places < before:
            cuts.append(version)
    gaps = [later - first for first, later in itertools.pairwise(cuts)]
    assert len(cuts) >= 3
    assert all(later >= 1.5 * first for first, later in itertools.pairwise(gaps))


def test_a_slow_generator_leaves_bound_and_places_as_they_are() -> None:
    _, decisions = played(Plant(generate=4.0, enough=1), 100)
    assert decisions == []


def test_what_was_chosen_and_avoided_survives_a_checkpoint() -> None:
    rule, _ = played(Plant(generate=0.9, enough=3, drift=0.005), 77)
    again = Rule.from_json(rule.to_json(), LIMITS)
    assert again.to_json() == rule.to_json()
    tighter = Limits(min_staleness=1, max_staleness=2, group_size=8, max_places=16, ess_target=0.95, ess_floor=0.5)
    assert Rule.from_json(rule.to_json(), tighter).max_staleness == 2


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 4000), marks=pytest.mark.extended)])
def test_on_any_run_it_comes_to_rest_near_the_best_bound(seeds: range) -> None:
    for seed in seeds:
        dice = random.Random(seed)
        plant = Plant(
            train=dice.uniform(0.2, 2),
            generate=dice.uniform(0.05, 4),
            enough=dice.randint(1, 8),
            drift=10 ** dice.uniform(-5, -1.5),
            noise=dice,
        )
        _, early = played(plant, 600)
        rule, late = played(plant, 400, _, first=601)
        assert len(late) <= 12, f"seed {seed}: it swings: {[one.action for one in late]}"
        assert len(early) <= 60, f"seed {seed}"
        allowed = [
            bound
            for bound in range(LIMITS.min_staleness, LIMITS.max_staleness + 1)
            if bound == LIMITS.min_staleness or 1 - plant.drift * bound**2 * 1.2 >= LIMITS.ess_target
        ]
        best = min(plant.step_seconds(bound, LIMITS.max_places) for bound in allowed)
        found = plant.step_seconds(rule.max_staleness, rule.places)
        assert found <= 1.4 * best, f"seed {seed}: {found:.2f} s per step with {rule.max_staleness}, best {best:.2f}"
        assert 1 - plant.drift * rule.max_staleness**2 >= LIMITS.ess_target - 0.03 or rule.max_staleness <= 2
