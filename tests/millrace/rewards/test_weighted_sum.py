"""Sums of rewards: each part by itself, all in the components, and no sum of what is not there."""

import pytest

from configs.scoring import ScoringConfig
from millrace.errors import InputError
from millrace.rewards.base import Reward, Score
from millrace.rewards.factory import WeightedSum, make_reward
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt

PROMPT = Prompt(prompt_id="p", text="?", answer="42", source="test")


class Fixed(Reward):
    """A verifier that always says the same."""

    version = "1"

    def __init__(self, name: str, said: Score) -> None:
        self.name = name  # type: ignore[misc]  # as many of them as a test wants
        self._said = said

    def score(self, prompt: Prompt, response: str) -> Score:
        return self._said


def summed(*said: Score) -> Score:
    parts = [Fixed(f"part{number}", one) for number, one in enumerate(said)]
    weights = {part.name: float(number + 1) for number, part in enumerate(parts)}
    with Scorer(WeightedSum(parts, weights)) as scorer:
        [judged] = scorer.score_many([(PROMPT, "?")])
    return judged


TIMED_OUT = Score(reward=None, status="timeout", error="no verdict after 1 s")
FAILED = Score(reward=None, status="error", error="KeyError")


def test_the_sum_is_weighted_and_keeps_its_parts() -> None:
    score = summed(Score(reward=0.5), Score(reward=-1.0, components={"part1": -1.0, "extracted": 1.0}))
    assert score.reward == 1 * 0.5 + 2 * -1.0
    assert score.components == {"part0": 0.5, "part1": -1.0, "part1/extracted": 1.0}


@pytest.mark.parametrize(
    ("said", "status", "error"),
    [
        ([Score(reward=1.0), FAILED], "error", "part1: KeyError"),
        ([TIMED_OUT, Score(reward=1.0)], "timeout", "part0: no verdict after 1 s"),
        ([TIMED_OUT, FAILED], "error", "part0: no verdict after 1 s; part1: KeyError"),
        (
            [Score(reward=3e38), Score(reward=3e38)],
            "error",
            "the sum: reward is 9e+38; expected a number between -3.4e38 and 3.4e38, as float32",
        ),
    ],
)
def test_a_part_without_a_reward_leaves_no_sum_and_its_name(said: list[Score], status: str, error: str) -> None:
    assert summed(*said) == Score(reward=None, status=status, error=error)  # type: ignore[arg-type]


@pytest.mark.slow
def test_parts_are_judged_apart_and_here_and_land_in_their_rows() -> None:
    own = "tests.support.rewards.own_rewards:slow"
    weights = {"math": 1.0, "exact_match": 0.1, own: 0.0}
    reward = make_reward(ScoringConfig(reward="weighted_sum", weights=weights))
    responses = ["42", "42.0", "99", "0.01"]
    with Scorer(reward, Limits(workers=2, timeout_seconds=1.0)) as scorer:
        judged = scorer.score_many([(PROMPT, response) for response in responses])
        version = scorer.version
    assert [one.status for one in judged] == ["timeout", "timeout", "timeout", "ok"]
    assert judged[0].error == f"{own}: no verdict after 1 s"
    assert judged[3].components[own] == 0.01
    assert version.startswith("0.1*exact_match(2) + 1*math(4 math-verify-")


@pytest.mark.parametrize(
    "weights",
    [{}, {"maths": 1.0}, {"weighted_sum": 1.0}],
)
def test_what_can_not_be_added_is_refused(weights: dict[str, float]) -> None:
    with pytest.raises(InputError):
        make_reward(ScoringConfig(reward="weighted_sum", weights=weights))
