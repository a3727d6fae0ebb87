"""Demonstrations: a slip is the sum with its first carry wrong, and nothing else."""

import random

import pytest

from millrace.demonstrations import carry_slip, demonstration, talk
from millrace.environments.calculator import Calculator
from millrace.prompts import ARITHMETIC, load_prompts
from millrace.types import Prompt


def arithmetic(digits: int, max_sum: int) -> list[Prompt]:
    prompts = load_prompts(
        source=ARITHMETIC,
        eval_source=None,
        prompt_field="prompt",
        answer_field="answer",
        digits=digits,
        max_sum=max_sum,
        num_eval=1,
    )
    return [*prompts.train, *prompts.eval]


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


@pytest.mark.parametrize(("digits", "max_sum"), [(1, 18), (2, 99), (2, 198)])
def test_a_slip_differs_from_the_answer_has_its_width_and_only_its_first_carry_is_wrong(
    digits: int, max_sum: int
) -> None:
    for prompt in arithmetic(digits, max_sum):
        slipped = carry_slip(prompt)
        assert slipped is not None
        assert slipped != prompt.answer
        assert len(slipped) == len(prompt.answer)
        assert added_by_hand(prompt, first_carry_wrong=False) == prompt.answer
        assert added_by_hand(prompt, first_carry_wrong=True) == slipped


def test_a_sum_of_one_digit_has_no_place_for_a_carry_and_so_no_slip() -> None:
    assert {carry_slip(prompt) for prompt in arithmetic(1, 9)} == {None}


def test_of_prompts_that_are_not_arithmetic_only_the_right_answer_is_known() -> None:
    prompt = Prompt(prompt_id="p", text="12+30=", answer="42", source="sums.jsonl")
    assert carry_slip(prompt) is None
    assert {demonstration(prompt, random.Random(seed), slip_rate=1.0) for seed in range(10)} == {"42"}


@pytest.mark.parametrize(("slip_rate", "expected"), [(0.0, {"42"}), (1.0, {"52"}), (0.5, {"42", "52"})])
def test_the_slip_rate_says_how_often_a_demonstrator_slips(slip_rate: float, expected: set[str]) -> None:
    prompt = Prompt(prompt_id="p", text="12+30=", answer="42", source=ARITHMETIC)
    assert {demonstration(prompt, random.Random(seed), slip_rate) for seed in range(50)} == expected


def test_who_is_right_has_used_the_environment_and_who_slips_has_not() -> None:
    prompt = Prompt(prompt_id="p", text="12+30=", answer="42", source=ARITHMETIC)
    seen = {tuple(talk(prompt, random.Random(seed), 0.5, Calculator())) for seed in range(50)}
    assert seen == {(("<12+30>", True), ("42|", False), ("42", True)), (("52", True),)}


def test_without_an_environment_or_an_example_of_its_use_a_demonstration_is_the_answer() -> None:
    sums = Prompt(prompt_id="p", text="12+30=", answer="42", source="sums.jsonl")
    assert talk(sums, random.Random(0), 0.0, None) == [("42", True)]
    words = Prompt(prompt_id="p", text="how many?", answer="42", source="words.jsonl")
    assert talk(words, random.Random(0), 0.0, Calculator()) == [("42", True)]
