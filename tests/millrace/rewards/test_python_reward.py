"""A function of one's own: what it returns is the reward; what can't be called is a sentence before anything runs."""

import pytest

from configs.scoring import ScoringConfig
from millrace.errors import InputError
from millrace.rewards.base import safe_score
from millrace.rewards.factory import make_part, make_reward
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt

PROMPT = Prompt(prompt_id="12+30=", text="12+30=", answer="42", source="test")
OWN = "tests.support.rewards.own_rewards"


def test_a_number_is_the_reward() -> None:
    with Scorer(make_reward(ScoringConfig(reward=f"{OWN}:length"))) as scorer:
        [judged] = scorer.score_many([(PROMPT, "12345")])
    assert judged.reward == 5.0
    assert judged.components == {}


def test_a_dict_is_the_reward_and_its_components() -> None:
    with Scorer(make_reward(ScoringConfig(reward=f"{OWN}:parts"))) as scorer:
        [judged] = scorer.score_many([(PROMPT, "42")])
    assert judged.reward == 0.5
    assert judged.components == {"is_the_answer": 1.0, "named": 1.0}


@pytest.mark.parametrize(
    ("returned", "components"),
    [("{'score': 0.5, 'part': 1}", {"part": 1.0}), ("{'reward': 0.5, 'score': 2}", {"score": 2.0})],
)
def test_the_reward_of_a_dict_is_its_reward_or_else_its_score(returned: str, components: dict[str, float]) -> None:
    reward = make_reward(ScoringConfig(reward=f"{OWN}:as_told"))
    reward.load()
    score = safe_score(reward, PROMPT, returned)
    assert (score.reward, score.components) == (0.5, components)


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ("None", "TypeError: reward is of type NoneType; expected a number"),
        ("'1'", "TypeError: reward is of type str; expected a number"),
        ("float('nan')", "ValueError: reward is nan; expected a finite number"),
        ("10**400", "OverflowError: int too large to convert to float"),
        ("{}", "ValueError: the function returned []; expected a dict with the key reward or score"),
        ("(x for x in [1.0])", "TypeError: reward is of type generator; expected a number"),
        ("{'reward': 1, 'part': float('inf')}", "ValueError: part is inf; expected a finite number"),
        ("1/0", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_reward_is_an_error(returned: str, error: str) -> None:
    reward = make_reward(ScoringConfig(reward=f"{OWN}:as_told"))
    reward.load()
    assert safe_score(reward, PROMPT, returned).error == error


def test_the_version_is_that_of_the_source() -> None:
    one, other, elsewhere = (
        make_reward(ScoringConfig(reward=path))
        for path in (f"{OWN}:length", f"{OWN}:parts", "benchmarks.rewards:quick")
    )
    for reward in (one, other, elsewhere):
        reward.load()
    assert one.version.split()[0] == f"{OWN}:length"
    assert one.version.split()[1] == other.version.split()[1]
    assert one.version.split()[1] != elsewhere.version.split()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        "tests.support.rewards.nowhere:f",
        "tests.support.rewards.module_that_raises:f",
        "tests.support.rewards.module_that_ends:f",
        "tests.support.rewards.module_that_dies:f",
        f"{OWN}:nothing",
        f"{OWN}:NOT_A_FUNCTION",
        f"{OWN}:of_two",
        f"{OWN}:later",
        f"{OWN}:one_by_one",
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_one_line(function: str) -> None:
    with pytest.raises(InputError) as caught:
        Scorer(make_part(function, {})).check()
    assert "\n" not in str(caught.value)
