"""What to learn from in a warm start: right answers, and ones with the slip that people make."""

import random

from millrace.environments.base import Environment
from millrace.prompts import ARITHMETIC
from millrace.types import Prompt


def demonstration(prompt: Prompt, rng: random.Random, slip_rate: float) -> str:
    """An answer to learn from: the right one or, for arithmetic and with probability `slip_rate`, one that slipped."""
    slipped = carry_slip(prompt)
    return prompt.answer if slipped is None or rng.random() >= slip_rate else slipped


def talk(
    prompt: Prompt, rng: random.Random, slip_rate: float, environment: Environment | None
) -> list[tuple[str, bool]]:
    """A whole response to learn from: (text, whether the policy wrote it) of each piece, the answer last.

    Who slips has answered at once; who is right has used the environment before, where there is one.
    """
    answer = demonstration(prompt, rng, slip_rate)
    if environment is None or answer != prompt.answer:
        return [(answer, True)]
    environment.reset(prompt, rng.getrandbits(63))
    pieces = []
    for turn in environment.example(prompt):
        pieces += [(turn, True), (environment.step(turn).text, False)]
    return [*pieces, (answer, True)]


def carry_slip(prompt: Prompt) -> str | None:
    """The sum with its first carry wrong: forgotten where there is one, made up where there is none.

    None for prompts that are not arithmetic, of which only the right answer is known, and for sums of a single digit,
    which has no place to carry into.
    """
    width = len(prompt.answer)
    if prompt.source != ARITHMETIC or width == 1:
        return None
    a, b = (int(summand) for summand in prompt.text.removesuffix("=").split("+"))
    slipped = a + b - 10 if a % 10 + b % 10 >= 10 else a + b + 10
    return f"{slipped % 10**width:0{width}d}"
