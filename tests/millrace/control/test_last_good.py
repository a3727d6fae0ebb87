"""The last good version and its learning rate, step by step and over several trainers."""

import json
import random
from collections.abc import Sequence

import pytest

from millrace.control.collapse import Collapse, CollapseWatch

RATE = 1e-4
SEEDS = range(50)


def collapse_of(
    rewards: Sequence[float], rates: Sequence[float] | None = None, *, lag: int = 0, trainers: int = 1
) -> Collapse:
    """The first collapse, with the step's rate each, on what versions `lag` before the newest sampled.

    `trainers` make the steps in turn, as many each, from the state that the one before left.
    """
    watch = CollapseWatch()
    for i, reward in enumerate(rewards):
        if i % -(-len(rewards) // trainers) == 0:
            watch = CollapseWatch(**json.loads(json.dumps(watch.state())))
        rate = RATE if rates is None else rates[i]
        earned_by = max(0, i - lag)
        sentence = watch.step(i + 1, reward=reward, entropy=1.0, mismatch_kl=0.0, earned_by=earned_by, rate=rate)
        if sentence is not None:
            return watch.collapse(sentence, rate)
    raise AssertionError("no collapse")


def test_the_last_good_version_sampled_the_last_good_step() -> None:
    assert collapse_of([0.6] * 20 + [-0.6] * 30).good_version == 19
    assert collapse_of([0.6] * 20 + [-0.6] * 30, lag=3).good_version == 16


def test_the_rate_before_a_tenfold_rise_is_good_though_rewards_show_it_later() -> None:
    for trainers, lag in ((1, 0), (2, 0), (2, 2), (4, 4), (12, 4)):
        rewards = [0.6] * (60 + 1 + lag) + [0.4, 0.2] + [0.0] * (57 - lag)
        result = collapse_of(rewards, [RATE] * 60 + [10 * RATE] * 60, lag=lag, trainers=trainers)
        assert 60 <= result.good_version <= 63
        assert (result.good_rate, result.bad_rate) == (RATE, 10 * RATE)
        assert result.rate_ratio == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("rates", "ratio"),
    [
        ([RATE] * 40, 1.0),
        ([RATE] * 20 + [RATE / 2] * 20, 1.0),
        ([RATE * step / 100 for step in range(1, 41)], 11 / 26),
    ],
)
def test_the_ratio_of_the_rates_is_one_unless_the_rate_rose(rates: list[float], ratio: float) -> None:
    result = collapse_of([0.6] * 20 + [0.0] * 20, rates)
    assert result.rate_ratio == pytest.approx(ratio)


def test_a_plateau_is_good_to_its_end_and_not_where_it_was_best_by_chance() -> None:
    for seed in SEEDS:
        dice = random.Random(seed)
        steady = [sum(dice.random() < 0.5 for _ in range(128)) / 128 for _ in range(1000)]
        assert 900 < collapse_of([*steady, *[0.0] * 20], trainers=3).good_version <= 1000, f"seed {seed}"


def test_without_good_steps_nothing_is_known() -> None:
    result = CollapseWatch().collapse("not finite", RATE)
    assert (result.good_version, result.good_rate, result.rate_ratio) == (0, None, 1.0)
