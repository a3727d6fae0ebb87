"""A user's function as the reward: its result, or one line before anything runs if it can't be called."""

import pytest
from support.rewards import own_rewards
from support.rewards.one_source import score_pairs, scorer_of

from configs.task import ScoringConfig
from millrace.errors import InputError
from millrace.rewards.base import Reward, safe_score
from millrace.rewards.factory import make_part, make_reward
from millrace.types import Prompt

PROMPT = Prompt(prompt_id="12+30=", text="12+30=", answer="42", source="test")
OWN = "tests.support.rewards.own_rewards"


def loaded(function: str) -> Reward:
    reward = make_reward(ScoringConfig(reward=function))
    reward.load()
    return reward


def test_the_function_gets_the_prompt_its_answer_and_its_id() -> None:
    with scorer_of(make_reward(ScoringConfig(reward=f"{OWN}:parts"))) as scorer:
        [score] = score_pairs(scorer, [(PROMPT, "42")])
    assert score.reward == 0.5
    assert score.components == {"is_the_answer": 1.0, "named": 1.0}


@pytest.mark.parametrize(
    ("returned", "components"),
    [
        ("0.5", {}),
        ("{'score': 0.5, 'part': 1}", {"part": 1.0}),
        ("{'reward': 0.5, 'score': 2}", {"score": 2.0}),
    ],
)
def test_a_number_or_a_dict_is_the_reward_and_its_components(returned: str, components: dict[str, float]) -> None:
    score = safe_score(loaded(f"{OWN}:evaluate"), PROMPT, returned)
    assert (score.reward, score.components) == (0.5, components)


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ("None", "TypeError: reward is None; expected a finite number"),
        ("'1'", "TypeError: reward is '1'; expected a finite number"),
        ("float('nan')", "TypeError: reward is nan; expected a finite number"),
        ("10**400", "OverflowError: int too large to convert to float"),
        ("{}", "TypeError: the function returned []; expected a dict with the key reward or score"),
        ("{'reward': 1, 'part': float('inf')}", "TypeError: part is inf; expected a finite number"),
    ],
)
def test_any_other_result_is_an_error(returned: str, error: str) -> None:
    assert safe_score(loaded(f"{OWN}:evaluate"), PROMPT, returned).error == error


def test_an_exception_of_the_function_is_an_error_with_its_file_and_line() -> None:
    line = own_rewards.evaluate.__code__.co_firstlineno + 2
    error = safe_score(loaded(f"{OWN}:evaluate"), PROMPT, "1/0").error
    assert error == f"tests/support/rewards/own_rewards.py:{line}: ZeroDivisionError: division by zero"


def test_the_version_is_that_of_the_source() -> None:
    length, parts, elsewhere = (
        loaded(path).version.split() for path in (f"{OWN}:length", f"{OWN}:parts", "benchmarks.rewards:quick")
    )
    assert length[0] == f"{OWN}:length"
    assert length[1] == parts[1] != elsewhere[1]


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
def test_a_function_that_can_not_be_used_is_refused_in_one_line(function: str) -> None:
    with pytest.raises(InputError) as caught:
        scorer_of(make_part(function, {})).check()
    assert "\n" not in str(caught.value)
