"""Rewards, entropies and divergences that say that training has collapsed, step by step."""

import json
import math
import random
from collections.abc import Sequence

import pytest

from millrace.control.collapse import CollapseWatch

SEEDS = range(50)


def reports(
    rewards: Sequence[float],
    entropies: Sequence[float] | None = None,
    kls: Sequence[float] | None = None,
    *,
    trainers: int = 1,
) -> list[tuple[int, str]]:
    """Returns (step, sentence) of each collapse that the watch reports.

    `trainers` make the steps in turn, as many each, from the state that the one before left.
    """
    watch = CollapseWatch()
    result = []
    for i, reward in enumerate(rewards):
        if i % -(-len(rewards) // trainers) == 0:
            watch = CollapseWatch(**json.loads(json.dumps(watch.state())))
        entropy = 1.0 if entropies is None else entropies[i]
        kl = 0.0 if kls is None else kls[i]
        sentence = watch.step(i + 1, reward=reward, entropy=entropy, mismatch_kl=kl)
        if sentence is not None:
            result.append((i + 1, sentence))
    return result


def test_a_collapsed_reward_is_reported_once_until_it_recovers() -> None:
    result = reports([0.6] * 20 + [0.0] * 30 + [0.6] * 40 + [0.0] * 30)
    assert [step for step, _ in result] == [26, 96]
    assert result[0][1] == ("version 26: the mean reward of the last 10 steps is 0.240, and was 0.600 at its best")


def test_a_hovering_reward_is_reported_once() -> None:
    assert len(reports([0.6] * 20 + [0.1] * 20 + [0.28, 0.32] * 50)) == 1


@pytest.mark.parametrize("reward", [0.09, 0.0, -1.0])
def test_a_reward_that_was_never_good_does_not_collapse(reward: float) -> None:
    assert reports([reward] * 20 + [-5.0] * 20) == []


def test_chance_is_no_collapse_and_halving_twice_is() -> None:
    for seed in SEEDS:
        dice = random.Random(seed)

        def step(chance: float, dice: random.Random = dice) -> float:
            return sum(dice.random() < chance for _ in range(128)) / 128

        steady = [step(0.12) for _ in range(300)]
        assert reports(steady) == [], f"seed {seed}"
        assert len(reports(steady + [step(0.025) for _ in range(60)])) == 1, f"seed {seed}"


def test_a_certain_policy_has_collapsed_only_if_it_earns_less() -> None:
    certain = [1.0] * 10 + [0.5] * 10 + [0.001] * 30
    assert reports([0.3] * 20 + [0.9] * 30, certain) == []
    result = reports([0.9] * 20 + [0.55] * 30, certain)
    assert len(result) == 1
    assert "entropy is 0.0010 nats per token, and was 1.0000" in result[0][1]


@pytest.mark.parametrize("kl", [1.5, math.inf, math.nan])
def test_three_divergent_steps_in_a_row_are_a_collapse(kl: float) -> None:
    kls = [0.0] * 12 + [kl, kl, 0.1, kl, kl, kl, kl]
    result = reports([0.5] * len(kls), kls=kls)
    assert [step for step, _ in result] == [18]
    assert "KL(μ‖π)" in result[0][1]


def test_a_trainer_continues_the_watch_of_its_predecessor() -> None:
    rewards, kls = [0.6] * 30 + [0.0] * 30, [0.0] * 58 + [1.5] * 2
    [alone] = reports(rewards, kls=kls)
    assert alone[0] == 36
    for trainers in (2, 3, 4, 5, 10, 12, 20, 30, 60):
        assert reports(rewards, kls=kls, trainers=trainers)[0] == alone, f"{trainers} trainers"
    [(_, sentence)] = reports([0.9] * 30 + [0.55] * 30, [1.0] * 10 + [0.001] * 50, trainers=2)
    assert "entropy is 0.0010 nats per token, and was 1.0000" in sentence
    [(step, _)] = reports([0.5] * 20, kls=[0.0] * 8 + [2.0] * 12, trainers=2)
    assert step == 11, "two steps of one trainer and one of the next"


def test_a_lasting_collapse_is_reported_by_each_trainer() -> None:
    assert [step for step, _ in reports([0.6] * 20 + [0.0] * 40, trainers=3)] == [26, 41]
