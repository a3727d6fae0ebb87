"""Demonstrations for the warm start: right answers, and answers with the carry error that people make."""

import random

from millrace.generation.environments.base import Environment
from millrace.prompts.arithmetic import ARITHMETIC
from millrace.types import Prompt


def demonstration(prompt: Prompt, rng: random.Random, error_rate: float) -> str:
    """The right answer or, for arithmetic and with probability `error_rate`, one with a carry error."""
    wrong = carry_error(prompt)
    return prompt.answer if wrong is None or rng.random() >= error_rate else wrong


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
