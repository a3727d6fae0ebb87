"""Rewards, entropies and divergences that say that training has collapsed, step by step."""

import math
import random

import pytest

from millrace.control.collapse import Collapse, CollapseWatch

SEEDS = range(50)


def told(
    rewards: list[float], entropies: list[float] | None = None, kls: list[float] | None = None
) -> list[tuple[int, Collapse]]:
    """(step, collapse) of each that is reported."""
    watch = CollapseWatch()
    found = []
    for i, reward in enumerate(rewards):
        entropy = 1.0 if entropies is None else entropies[i]
        kl = 0.0 if kls is None else kls[i]
        collapse = watch.step(i + 1, reward=reward, entropy=entropy, mismatch_kl=kl)
        if collapse is not None:
            found.append((i + 1, collapse))
    return found


def test_a_reward_that_collapses_is_told_of_once_until_it_is_back_and_then_again() -> None:
    found = told([0.6] * 20 + [0.0] * 30 + [0.6] * 40 + [0.0] * 30)
    assert [step for step, _ in found] == [26, 96]
    assert found[0][1].sentence == (
        "version 26: the mean reward of the last 10 steps is 0.240, and was 0.600 at its best"
    )
    assert found[0][1].good_version == 20


def test_a_hovering_reward_is_told_of_once() -> None:
    assert len(told([0.6] * 20 + [0.1] * 20 + [0.28, 0.32] * 50)) == 1


@pytest.mark.parametrize("reward", [0.09, 0.0, -1.0])
def test_a_reward_that_was_never_good_can_not_collapse(reward: float) -> None:
    assert told([reward] * 20 + [-5.0] * 20) == []


def test_a_policy_that_stays_as_it_is_is_not_taken_to_collapse_and_one_that_halves_twice_is() -> None:
    for seed in SEEDS:
        dice = random.Random(seed)

        def step(chance: float, dice: random.Random = dice) -> float:
            return sum(dice.random() < chance for _ in range(128)) / 128

        steady = [step(0.12) for _ in range(300)]
        assert told(steady) == [], f"seed {seed}"
        assert len(told(steady + [step(0.025) for _ in range(60)])) == 1, f"seed {seed}"


def test_a_certain_policy_has_collapsed_only_if_it_earns_less() -> None:
    certain = [1.0] * 10 + [0.5] * 10 + [0.001] * 30
    assert told([0.3] * 20 + [0.9] * 30, certain) == []
    found = told([0.9] * 20 + [0.55] * 30, certain)
    assert len(found) == 1
    assert "entropy is 0.0010 nats per token, and was 1.0000" in found[0][1].sentence


@pytest.mark.parametrize("kl", [1.5, math.inf, math.nan])
def test_three_steps_in_a_row_far_from_the_sampling_policy_are_a_collapse(kl: float) -> None:
    kls = [0.0] * 12 + [kl, kl, 0.1, kl, kl, kl, kl]
    found = told([0.5] * len(kls), kls=kls)
    assert [step for step, _ in found] == [18]
    assert "KL(μ‖π)" in found[0][1].sentence
