"""Rewards, entropies and divergences that say that training has collapsed, step by step."""

import json
import math
import random
from collections.abc import Sequence

import pytest

from millrace.control.collapse import CollapseWatch

SEEDS = range(50)


def told(
    rewards: Sequence[float],
    entropies: Sequence[float] | None = None,
    kls: Sequence[float] | None = None,
    *,
    trainers: int = 1,
) -> list[tuple[int, str]]:
    """(step, sentence) of each collapse that is told of.

    `trainers` make the steps in turn, as many each, from the state that the one before left.
    """
    watch = CollapseWatch()
    found = []
    for i, reward in enumerate(rewards):
        if i % -(-len(rewards) // trainers) == 0:
            watch = CollapseWatch(json.loads(json.dumps(watch.state())))
        entropy = 1.0 if entropies is None else entropies[i]
        kl = 0.0 if kls is None else kls[i]
        sentence = watch.step(i + 1, reward=reward, entropy=entropy, mismatch_kl=kl)
        if sentence is not None:
            found.append((i + 1, sentence))
    return found


def test_a_reward_that_collapses_is_told_of_once_until_it_is_back_and_then_again() -> None:
    found = told([0.6] * 20 + [0.0] * 30 + [0.6] * 40 + [0.0] * 30)
    assert [step for step, _ in found] == [26, 96]
    assert found[0][1] == ("version 26: the mean reward of the last 10 steps is 0.240, and was 0.600 at its best")


def test_a_hovering_reward_is_told_of_once() -> None:
    assert len(told([0.6] * 20 + [0.1] * 20 + [0.28, 0.32] * 50)) == 1


@pytest.mark.parametrize("reward", [0.09, 0.0, -1.0])
def test_a_reward_that_was_never_good_can_not_collapse(reward: float) -> None:
    assert told([reward] * 20 + [-5.0] * 20) == []


def test_chance_is_no_collapse_and_halving_twice_is() -> None:
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
    assert "entropy is 0.0010 nats per token, and was 1.0000" in found[0][1]


@pytest.mark.parametrize("kl", [1.5, math.inf, math.nan])
def test_three_steps_in_a_row_far_from_the_sampling_policy_are_a_collapse(kl: float) -> None:
    kls = [0.0] * 12 + [kl, kl, 0.1, kl, kl, kl, kl]
    found = told([0.5] * len(kls), kls=kls)
    assert [step for step, _ in found] == [18]
    assert "KL(μ‖π)" in found[0][1]


def test_a_trainer_knows_what_its_predecessors_measured() -> None:
    rewards, kls = [0.6] * 30 + [0.0] * 30, [0.0] * 58 + [1.5] * 2
    [alone] = told(rewards, kls=kls)
    assert alone[0] == 36
    for trainers in (2, 3, 4, 5, 10, 12, 20, 30, 60):
        assert told(rewards, kls=kls, trainers=trainers)[0] == alone, f"{trainers} trainers"
    [(_, sentence)] = told([0.9] * 30 + [0.55] * 30, [1.0] * 10 + [0.001] * 50, trainers=2)
    assert "entropy is 0.0010 nats per token, and was 1.0000" in sentence
    [(step, _)] = told([0.5] * 20, kls=[0.0] * 8 + [2.0] * 12, trainers=2)
    assert step == 11, "two steps of one trainer and one of the next"


def test_a_collapse_that_lasts_is_told_of_by_each_trainer() -> None:
    assert [step for step, _ in told([0.6] * 20 + [0.0] * 40, trainers=3)] == [26, 41]
