"""Runs whose stages live and yet get nowhere, and rewards that collapse: look by look, without a clock."""

import random
from typing import Any

import pytest

from millrace.runtime.anomalies import AnomalyDetector, CollapseDetector, StallDetector
from millrace.runtime.messages import LOADING, STARTING, STOPPED, Event

DOING = {"generate-0": "waiting for weights or room under max_staleness", "train-0": "waiting for scored groups"}
SEEDS = range(50)


def status(*, steps: int = 5, generated: int = 640, trained: int = 512, **values: Any) -> dict[str, Any]:
    """A look at a run."""
    ledger = {
        "generated": {"rollouts": generated, "tokens": 3 * generated},
        "trained": {"rollouts": trained, "tokens": 3 * trained},
        "dropped": {},
    }
    return {"steps": steps, "ledger": ledger, "doing": DOING, "reward_mean": None, **values}


def test_a_run_in_which_nothing_moves_is_told_of_once_with_what_each_stage_is_doing() -> None:
    detector = StallDetector(60)
    assert [detector.look(status(), now) for now in (1000, 1030, 1059)] == [None] * 3
    expected = Event(kind="pipeline.stalled", payload={"seconds": 60, "doing": DOING})
    assert [detector.look(status(), now) for now in (1060, 1061, 2000)] == [expected, None, None]


def test_a_run_whose_stages_an_attempt_has_not_started_yet_is_not_stalled() -> None:
    detector = StallDetector(60)
    before = status(doing={"generate-0": STOPPED, "train-0": "waiting for scored groups", "bootstrap-0": STOPPED})
    assert [detector.look(before, now) for now in (0, 59, 119)] == [None] * 3
    begun = status(doing={**DOING, "bootstrap-0": STOPPED})
    assert detector.look(begun, 178) is None
    assert detector.look(begun, 179) is not None


@pytest.mark.parametrize("moved", [{"generated": 648}, {"trained": 520}, {"steps": 6}, {"steps": 4}])
def test_whatever_moves_begins_anew_and_the_next_stall_is_told_of_too(moved: dict[str, int]) -> None:
    detector = StallDetector(60)
    looks = [
        (status(), 0), (status(), 59), (status(**moved), 60), (status(**moved), 119), (status(**moved), 120),
        (status(), 121), (status(), 181),
    ]  # fmt: skip
    told = [now for look, now in looks if detector.look(look, now) is not None]
    assert told == [120, 181]


@pytest.mark.parametrize("doing", [STARTING, LOADING])
def test_a_run_that_waits_for_a_stage_to_load_is_not_stalled_until_long_after(doing: str) -> None:
    detector = StallDetector(60)
    loading = status(doing={**DOING, "generate-0": doing})
    assert [detector.look(loading, now) for now in (0, 100, 500)] == [None] * 3
    assert detector.look(status(), 559) is None
    assert detector.look(status(), 560) is not None


def looks(rewards: list[float], first_step: int = 1, stride: int = 1) -> list[dict[str, Any]]:
    """A look after every `stride` steps that had these rewards."""
    return [status(steps=first_step + i, reward_mean=rewards[i]) for i in range(0, len(rewards), stride)]


def test_a_reward_that_collapses_is_told_of_once_until_it_recovers_and_then_again() -> None:
    rewards = [0.6] * 20 + [0.0] * 30 + [0.6] * 40 + [0.0] * 30
    detector = CollapseDetector()
    told = [(look["steps"], event) for look in looks(rewards) if (event := detector.look(look)) is not None]
    assert [step for step, _ in told] == [27, 97]
    for _, event in told:
        assert event.kind == "reward.collapsed"
        assert event.payload["best"] == pytest.approx(0.6, abs=0.01)
        assert event.payload["reward_mean"] < event.payload["best"] / 2


def test_it_does_not_matter_how_often_one_looks() -> None:
    rewards = [0.6] * 21 + [0.0] * 30
    told = []
    for stride in (1, 5, 10):
        detector = CollapseDetector()
        told += [look["steps"] for look in looks(rewards, stride=stride) if detector.look(look) is not None]
    assert told[0] == 28
    assert all(28 <= step <= 28 + stride for step, stride in zip(told, (1, 5, 10), strict=True))


def test_a_hovering_reward_is_told_of_once() -> None:
    detector = CollapseDetector()
    rewards = [0.6] * 20 + [0.1] * 20 + [0.28, 0.32] * 50
    assert sum(detector.look(look) is not None for look in looks(rewards)) == 1


@pytest.mark.parametrize("reward", [0.09, 0.0, -1.0])
def test_a_reward_that_was_never_good_can_not_collapse(reward: float) -> None:
    detector = CollapseDetector()
    assert all(detector.look(look) is None for look in looks([reward] * 20 + [-5.0] * 20))


def test_a_policy_that_stays_as_it_is_is_not_taken_to_collapse_and_one_that_halves_twice_is() -> None:
    for seed in SEEDS:
        dice = random.Random(seed)

        def step(chance: float, dice: random.Random = dice) -> float:
            return sum(dice.random() < chance for _ in range(128)) / 128

        detector = CollapseDetector()
        steady = looks([step(0.1) for _ in range(300)])
        assert [look["steps"] for look in steady if detector.look(look) is not None] == [], f"seed {seed}"
        worse = looks([step(0.025) for _ in range(60)], first_step=301)
        assert sum(detector.look(look) is not None for look in worse) == 1, f"seed {seed}"


def test_a_step_back_to_a_checkpoint_counts_as_one_step() -> None:
    detector = CollapseDetector()
    for look in looks([0.6] * 20) + looks([0.6] * 5, first_step=11):
        assert detector.look(look) is None
    assert detector.look(status(steps=16, reward_mean=0.0)) is None, "one bad step is no collapse"


def test_a_look_says_all_that_is_wrong_and_nothing_while_there_is_no_step() -> None:
    detector = AnomalyDetector(stall_seconds=30)
    assert detector.look(status(steps=0), 0) == []
    for look in looks([0.6] * 20):
        assert detector.look(look, 1) == []
    bad = status(steps=40, reward_mean=0.0)
    assert [event.kind for event in detector.look(bad, 2)] == ["reward.collapsed"]
    assert [event.kind for event in detector.look(bad, 40)] == ["pipeline.stalled"]
