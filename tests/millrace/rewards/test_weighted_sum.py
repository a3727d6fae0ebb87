"""Sums of rewards: each part is scored separately and kept in the components; a failed part leaves no sum."""

import re

import pytest
from support.rewards.one_source import score_pairs, scorer_of

from configs.task import ScoringConfig
from millrace.errors import InputError
from millrace.rewards.base import Reward, Score
from millrace.rewards.factory import WeightedSum, make_reward
from millrace.rewards.isolation.sandbox import Limits
from millrace.types import Prompt

PROMPT = Prompt(prompt_id="p", text="?", answer="42", source="test")


class Fixed(Reward):
    """A verifier that always returns the same score."""

    version = "1"

    def __init__(self, name: str, score: Score) -> None:
        self.name = name  # type: ignore[misc]  # a test makes several
        self._score = score

    def score(self, prompt: Prompt, response: str) -> Score:
        return self._score


def sum_of(*scores: Score) -> Score:
    parts = [Fixed(f"part{number}", score) for number, score in enumerate(scores)]
    weights = {part.name: float(number + 1) for number, part in enumerate(parts)}
    with scorer_of(WeightedSum(parts, weights)) as scorer:
        [total] = score_pairs(scorer, [(PROMPT, "?")])
    return total


TIMED_OUT = Score(reward=None, status="timeout", error="no verdict after 1 s")
FAILED = Score(reward=None, status="error", error="KeyError")
LARGE = Score(reward=3e38)


def test_the_sum_is_weighted_and_keeps_its_parts() -> None:
    score = sum_of(Score(reward=0.5), Score(reward=-1.0, components={"part1": -1.0, "extracted": 1.0}))
    assert score.reward == 1 * 0.5 + 2 * -1.0
    assert score.components == {"part0": 0.5, "part1": -1.0, "part1/extracted": 1.0}


@pytest.mark.parametrize(
    ("scores", "status", "error"),
    [
        ([Score(reward=1.0), FAILED], "error", "part1: KeyError"),
        ([TIMED_OUT, Score(reward=1.0)], "timeout", "part0: no verdict after 1 s"),
        ([TIMED_OUT, FAILED], "error", "part0: no verdict after 1 s; part1: KeyError"),
        ([LARGE, LARGE], "error", "the sum: reward is 9e+38; expected a number between -3.4e38 and 3.4e38, as float32"),
    ],
)
def test_a_part_without_a_reward_leaves_no_sum_and_is_named(scores: list[Score], status: str, error: str) -> None:
    assert sum_of(*scores) == Score(reward=None, status=status, error=error)  # type: ignore[arg-type]


@pytest.mark.slow
def test_isolated_and_local_parts_are_summed_row_by_row() -> None:
    own = "tests.support.rewards.own_rewards:sleep"
    reward = make_reward(ScoringConfig(reward="weighted_sum", weights={"math": 1.0, "exact_match": 0.1, own: 0.0}))
    responses = ["42", "42.0", "99", "0.01"]
    with scorer_of(reward, Limits(workers=2, timeout_seconds=1.0)) as scorer:
        scores = score_pairs(scorer, [(PROMPT, response) for response in responses])
        [version] = scorer.versions.values()
    assert [score.status for score in scores] == ["timeout", "timeout", "timeout", "ok"]
    assert scores[0].error == f"{own}: no verdict after 1 s"
    assert scores[3].components[own] == 0.01
    assert re.match(r"0\.1\*exact_match\(\d+\) \+ 1\*math\(\d+ math-verify-", version)


@pytest.mark.parametrize("weights", [{}, {"maths": 1.0}, {"weighted_sum": 1.0}])
def test_unknown_or_missing_parts_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(InputError) as caught:
        make_reward(ScoringConfig(reward="weighted_sum", weights=weights))
    assert caught.value.key == "scoring.weights"
