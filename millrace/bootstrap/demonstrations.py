"""Demonstrations for the warm start: right answers, and answers with the carry error that people make."""

import random
from collections.abc import Iterator

from millrace.generation.environments.base import Environment
from millrace.prompts.sums import ARITHMETIC, CHAINS, CHARACTERS_PER_SUM, last_digit, last_sum, written_out
from millrace.types import Prompt


def demonstration(prompt: Prompt, rng: random.Random, error_rate: float) -> str:
    """The right answer or, for arithmetic and with probability `error_rate`, one with a carry error.

    A chain of sums is written out, and each of its carries is wrong with that probability.
    """
    if prompt.source == CHAINS:
        return written_out(
            prompt.text, lambda a, b: misplaced_carry(a, b) if rng.random() < error_rate else last_digit(a, b)
        )
    wrong = carry_error(prompt)
    return prompt.answer if wrong is None or rng.random() >= error_rate else wrong


def right_response(prompt: Prompt) -> str:
    """Returns the response of a demonstrator without errors."""
    return written_out(prompt.text, last_digit) if prompt.source == CHAINS else prompt.answer


def dialogue(
    prompt: Prompt, rng: random.Random, error_rate: float, environment: Environment | None
) -> list[tuple[str, bool]]:
    """A whole response: (text, whether the policy wrote it) per piece, the answer last.

    A right answer follows a use of the environment, if there is one. A wrong answer is given at once.
    """
    answer = demonstration(prompt, rng, error_rate)
    if environment is None or answer != prompt.answer:
        return [(answer, True)]
    environment.reset(prompt, rng.getrandbits(63))
    pieces = []
    for turn in environment.example(prompt):
        pieces += [(turn, True), (environment.step(turn).text, False)]
    return [*pieces, (answer, True)]


def could_be_demonstrated(prompt: Prompt, text: str) -> bool:
    """Whether a demonstrator, right or wrong, could have written `text`."""
    if prompt.source != CHAINS:
        return text in (prompt.answer, carry_error(prompt))
    digits = iter(text[::CHARACTERS_PER_SUM])
    return text == written_out(prompt.text, lambda a, b: _demonstrated(a, b, digits))


def is_right(prompt: Prompt, text: str) -> bool:
    """Whether `text` gives the prompt's answer."""
    return (last_sum(text) if prompt.source == CHAINS else text) == prompt.answer


def carry_error(prompt: Prompt) -> str | None:
    """The sum with its first carry wrong: forgotten if there is one, invented if there is none.

    None for prompts that are not arithmetic, and for sums of one digit, which have no place to carry into.
    """
    width = len(prompt.answer)
    if prompt.source != ARITHMETIC or width == 1:
        return None
    a, b = (int(summand) for summand in prompt.text.removesuffix("=").split("+"))
    wrong = a + b - 10 if a % 10 + b % 10 >= 10 else a + b + 10
    return f"{wrong % 10**width:0{width}d}"


def misplaced_carry(a: int, b: int) -> int:
    """The last digit of the sum of two digits, with the carry added to it if there is one."""
    return last_digit(a, b) + (a + b >= 10)


def _demonstrated(a: int, b: int, written: Iterator[str]) -> int:
    """The next digit written, if it is the last digit of a + b in a demonstration; else one that is."""
    right = last_digit(a, b)
    return misplaced_carry(a, b) if next(written, "") == str(misplaced_carry(a, b)) else right
