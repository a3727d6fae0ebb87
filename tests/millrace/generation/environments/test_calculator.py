"""The calculator: integers, plus, minus and times, and nothing that a program could be written in."""

import random

import pytest

from millrace.generation.environments.calculator import LONGEST, Calculator, work_out
from millrace.types import Prompt


def prompt(text: str) -> Prompt:
    return Prompt(prompt_id="p", text=text, answer="", source="test")


def step(turn: str) -> str | None:
    """The calculator's answer; None where it takes the turn for the answer."""
    observation = Calculator().step(turn)
    assert not (observation.done and observation.text)
    return None if observation.done else observation.text


@pytest.mark.parametrize("seed", range(50))
def test_it_agrees_with_python_on_integers_plus_minus_and_times(seed: int) -> None:
    chance = random.Random(seed)
    expression = str(chance.randrange(1000))
    for _ in range(chance.randrange(8)):
        expression += chance.choice("+-*") + str(chance.randrange(10 ** chance.randrange(1, 5)))
    if chance.random() < 0.3:
        expression = "-" + expression
    assert work_out(expression) == eval(expression)


@pytest.mark.parametrize(("expression", "value"), [("007+08", 15), (" 2 * 3 - 10 ", -4), ("5", 5), ("- 3+1", -2)])
def test_blanks_and_leading_zeros_are_taken(expression: str, value: int) -> None:
    assert work_out(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "1+", "*2", "1++2", "1--2", "2**9", "(1+2)", "1/2", "1.5", "1e9", "0x1f", "1_000", "1 2", "x+1", "٣+٤",
        "__import__('os').system('true')", "1;2", "1+2\x00", "9" * (LONGEST + 1),
    ],
)  # fmt: skip
def test_anything_else_has_no_value(expression: str) -> None:
    assert work_out(expression) is None


def test_the_largest_expression_it_takes_is_worked_out() -> None:
    assert work_out("*".join(["9"] * (LONGEST // 2))) == 9 ** (LONGEST // 2)
    assert work_out("9" * LONGEST) == 10**LONGEST - 1


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("<12+34>", "46|"),
        ("let me see <1+1> <3*4>", "12|"),
        ("<1+2", None),
        ("46", None),
        ("", None),
        ("12+34>", "?|"),
        ("<>", "?|"),
        ("<<pad>1+2>", "?|"),
    ],
)
def test_a_turn_that_ends_with_a_call_gets_its_value(turn: str, answer: str | None) -> None:
    assert step(turn) == answer


def test_its_example_asks_for_a_prompts_sum() -> None:
    assert Calculator().example(prompt("12+34=")) == ("<12+34>",)
    assert Calculator().example(prompt("how many?")) == ()


def test_all_it_writes_and_is_asked_is_in_its_alphabet() -> None:
    written = step("<12*34-5>"), step("<?>"), *Calculator().example(prompt("12+34=")), *Calculator.stop
    assert set("".join(str(text) for text in written)) <= set(Calculator.alphabet)
