"""Mathematics: equal expressions earn 1, others 0, and unreadable ones are errors."""

from collections.abc import Iterator

import pytest
from support.rewards.hostile import DEEP_FRACTION

from configs.task import ScoringConfig
from millrace.rewards.base import Reward, Score, safe_score
from millrace.rewards.factory import make_reward
from millrace.types import Prompt


@pytest.fixture(scope="module")
def math() -> Iterator[Reward]:
    reward = make_reward(ScoringConfig(reward="math"))
    reward.load()
    yield reward


def score(math: Reward, answer: str, response: str) -> Score:
    return safe_score(math, Prompt(prompt_id="p", text="?", answer=answer, source="test"), response)


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("42", "42"),
        ("42", "So it is \\boxed{42}."),
        ("42", "The answer is $42$"),
        ("\\boxed{42}", "42.0"),
        ("1,234", "She has 1234 in all."),
        ("1234", "\\boxed{1,234}"),
        ("\\frac{1}{2}", "0.5"),
        ("\\frac12", "\\boxed{\\dfrac{2}{4}}"),
        ("x^2+1", "\\boxed{1+x^2}"),
        ("(1, 2)", "\\boxed{(1,2)}"),
        ("18", "9 * 2 = $18 a day.\n#### 18"),
        ("\\text{Monday}", "\\boxed{\\text{monday}}"),
        ("12", "I first thought \\boxed{11}, but that is wrong. The answer is \\boxed{12}."),
        ("12", "\\boxed{12}, that is \\boxed{12 + "),
        ("12", "<think>It is \\boxed{13}.</think> So <answer>12</answer>."),
        ("\\frac{1}{2}", "<answer>I am sure: \\boxed{0.5}</answer>"),
        ("ABC", "<answer>ABC</answer>"),
        ("2x", "\\boxed{x + x}"),
    ],
)
def test_an_equal_expression_earns_one(math: Reward, answer: str, response: str) -> None:
    assert score(math, answer, response) == Score(reward=1.0, components={"math": 1.0, "extracted": 1.0})


@pytest.mark.parametrize(
    ("answer", "response", "extracted"),
    [
        ("42", "43", 1.0),
        ("42", "\\boxed{42} or \\boxed{43}", 1.0),
        ("42", "\\boxed{41, 42}", 1.0),
        ("42", "42 is wrong, it is \\boxed{7}", 1.0),
        ("42", "forty-two", 0.0),
        ("42", "-07", 0.0),
        ("42", "\\boxed{}", 0.0),
        ("42", "", 0.0),
        ("42", "<think>42</think>", 0.0),
        ("42", "<answer>42</answer>, no, <answer>43</answer>", 1.0),
        ("BAC", "\\boxed{ABC}", 1.0),
        ("act", "\\boxed{cat}", 1.0),
        ("no", "\\boxed{\\text{on}}", 1.0),
    ],
)
def test_anything_else_earns_nothing(math: Reward, answer: str, response: str, extracted: float) -> None:
    assert score(math, answer, response) == Score(reward=0.0, components={"math": 0.0, "extracted": extracted})


def test_brackets_that_are_nested_too_deep_are_an_error(math: Reward) -> None:
    result = score(math, "\\frac{1}{2}", DEEP_FRACTION)
    assert result.status == "error"
    assert result.error == "ValueError: brackets are nested 3,001 deep; at most 200 are judged"


def test_brackets_that_are_never_closed_nest_nothing(math: Reward) -> None:
    assert score(math, "42", ":( " * 1000 + "\\boxed{42}").reward == 1.0


@pytest.mark.slow
def test_a_parser_without_stack_is_an_error(math: Reward) -> None:
    result = score(math, "5001", "\\boxed{" + "1+" * 5000 + "1}")
    assert result.status == "error"
    assert result.error is not None
    assert result.error.startswith("RecursionError")


@pytest.mark.parametrize(
    "answer", ["", " \n", "\\boxed{}", "\\text{ }", "\\quad", "---", "🎲", "The answer is unknown.", "forty-two"]
)
def test_an_answer_without_an_expression_is_an_error(math: Reward, answer: str) -> None:
    assert score(math, answer, "42").status == "error"
    with pytest.raises(ValueError):
        math.check_answer(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "1",
        "-07",
        "x y",
        "sin x",
        "\\infty",
        "∞",
        "\\text{no solution}",
        "Monday",
        "n/a",
        "(A)",
        "\\boxed{\\frac{1}{2}}",
        "π",
    ],
)
def test_an_answer_that_a_response_can_equal_is_accepted(math: Reward, answer: str) -> None:
    math.check_answer(answer)
    assert score(math, answer, f"\\boxed{{{answer}}}").reward == 1.0
