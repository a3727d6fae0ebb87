"""Demonstrations: an error is the sum with its first carry wrong, and nothing else."""

import random

import pytest

from millrace.bootstrap.demonstrations import (
    carry_error,
    could_be_demonstrated,
    demonstration,
    dialogue,
    is_right,
)
from millrace.generation.environments.calculator import Calculator
from millrace.prompts.sums import ARITHMETIC, CHAINS, arithmetic_prompts
from millrace.types import Prompt


def chain(text: str, answer: str) -> Prompt:
    return Prompt(prompt_id=f"chain-{text}", text=text, answer=answer, source=CHAINS)


def added_by_hand(prompt: Prompt, *, first_carry_wrong: bool) -> str:
    """The sum column by column from the right, cut to the answer's width, as one learns it at school."""
    width = len(prompt.answer)
    a, b = (summand.zfill(width)[::-1] for summand in prompt.text.removesuffix("=").split("+"))
    digits, carry = "", 0
    for column in range(width):
        total = int(a[column]) + int(b[column]) + carry
        digits, carry = str(total % 10) + digits, total // 10
        if column == 0 and first_carry_wrong:
            carry = 1 - carry
    return digits


def test_an_error_has_the_answers_width_and_only_its_first_carry_wrong() -> None:
    for prompt in arithmetic_prompts(digits=2):
        wrong = carry_error(prompt)
        assert wrong is not None
        assert wrong != prompt.answer
        assert len(wrong) == len(prompt.answer)
        assert added_by_hand(prompt, first_carry_wrong=False) == prompt.answer
        assert added_by_hand(prompt, first_carry_wrong=True) == wrong


def test_only_sums_with_room_for_a_carry_have_an_error() -> None:
    assert {carry_error(prompt) for prompt in arithmetic_prompts(digits=1)} == {None}
    prompt = Prompt(prompt_id="p", text="12+30=", answer="42", source="sums.jsonl")
    assert {demonstration(prompt, random.Random(seed), error_rate=1.0) for seed in range(10)} == {"42"}


@pytest.mark.parametrize(("error_rate", "expected"), [(0.0, {"42"}), (1.0, {"52"}), (0.5, {"42", "52"})])
def test_the_error_rate_says_how_often_a_demonstrator_errs(error_rate: float, expected: set[str]) -> None:
    prompt = Prompt(prompt_id="p", text="12+30=", answer="42", source=ARITHMETIC)
    assert {demonstration(prompt, random.Random(seed), error_rate) for seed in range(50)} == expected


def test_who_is_right_has_used_the_environment_and_who_is_wrong_has_not() -> None:
    prompt = Prompt(prompt_id="p", text="12+30=", answer="42", source=ARITHMETIC)
    seen = {tuple(dialogue(prompt, random.Random(seed), 0.5, Calculator())) for seed in range(50)}
    assert seen == {(("<12+30>", True), ("42|", False), ("42", True)), (("52", True),)}


def test_without_an_environments_example_a_demonstration_is_the_answer() -> None:
    sums = Prompt(prompt_id="p", text="12+30=", answer="42", source="sums.jsonl")
    assert dialogue(sums, random.Random(0), 0.0, None) == [("42", True)]
    words = Prompt(prompt_id="p", text="how many?", answer="42", source="words.jsonl")
    assert dialogue(words, random.Random(0), 0.0, Calculator()) == [("42", True)]


# --- chains of sums


@pytest.mark.parametrize(
    ("error_rate", "expected"),
    [
        (0.0, {"2 02:5+2=7 01:2+7=9"}),
        (1.0, {"3 02:5+3=8 01:3+8=2"}),
        (0.5, {"2 02:5+2=7 01:2+7=9", "3 02:5+3=8 01:3+8=1", "3 02:5+3=8 01:3+8=2"}),
    ],
)
def test_each_carry_of_a_chain_is_wrong_at_the_error_rate(error_rate: float, expected: set[str]) -> None:
    prompt = chain("03:7+5=", "2+7=9")
    assert {demonstration(prompt, random.Random(seed), error_rate) for seed in range(50)} == expected


def test_every_demonstration_of_a_chain_is_recognised() -> None:
    for seed in range(50):
        prompt = chain("12:7+8=", "")
        assert could_be_demonstrated(prompt, demonstration(prompt, random.Random(seed), error_rate=0.5))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "4 02:5+4=9 01:4+9=3",  # neither 12 nor a misplaced carry
        "2 02:5+2=8 01:2+8=0",  # an error where nothing is carried
        "2 02:5+3=8 01:3+8=1",  # copied wrong
        "2 01:5+2=7 01:2+7=9",  # counted wrong
        "2 02:5+2=7 01:2+7=9 00:7+9=6",
        "2 02:5+2=7 01:2+7=",
        "x 02:5+x=7 01:x+7=9",
    ],
)
def test_what_no_demonstrator_writes_is_recognised_too(text: str) -> None:
    assert not could_be_demonstrated(chain("03:7+5=", "2+7=9"), text)


def test_a_chain_is_right_if_its_last_sum_is() -> None:
    assert is_right(chain("02:7+5=", "5+2=7"), "2 01:5+2=7")
    assert not is_right(chain("02:7+5=", "5+2=7"), "3 01:5+3=8")
    assert not is_right(chain("02:7+5=", "5+2=7"), "")
    sums = Prompt(prompt_id="p", text="12+30=", answer="42", source=ARITHMETIC)
    assert is_right(sums, "42")
    assert not is_right(sums, "142")


def test_right_answers_and_wrong_carries_are_recognised() -> None:
    sums = Prompt(prompt_id="p", text="12+30=", answer="42", source=ARITHMETIC)
    assert [text for text in ("42", "52", "32", "") if could_be_demonstrated(sums, text)] == ["42", "52"]
