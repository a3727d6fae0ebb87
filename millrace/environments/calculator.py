"""An environment with one tool: a calculator that works out what stands between < and >."""

import math
import re
from collections.abc import Sequence

from millrace.environments.base import Environment, Observation
from millrace.types import Prompt

LONGEST = 64
"""Characters of an expression: a bound on the work, for a product of all of them is still a small number."""
_NUMBER = r"[0-9]+"
_EXPRESSION = re.compile(rf"\s*-?\s*{_NUMBER}(\s*[-+*]\s*{_NUMBER})*\s*")
_TERM = re.compile(rf"([+-]?)({_NUMBER}(?:\*{_NUMBER})*)")


class Calculator(Environment):
    """A turn that ends with a call, such as `<12+34>`, is answered `46|`, or `?|` where it can't be worked out.

    A turn that ends without one is the policy's answer.
    """

    stop = (">",)
    alphabet = "0123456789+-*<>|?"

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Nothing: a calculator remembers nothing."""

    def step(self, text: str) -> Observation:
        """The value of the expression behind the last `<`, where the turn ends with `>`."""
        if not text.endswith(">"):
            return Observation(done=True)
        _, call, expression = text[:-1].rpartition("<")
        value = work_out(expression) if call else None
        return Observation(text="?|" if value is None else f"{value}|")

    def example(self, prompt: Prompt) -> Sequence[str]:
        """One call with the prompt's own expression, where it is one: `12+34=` is led to its answer by `<12+34>`."""
        expression = prompt.text.removesuffix("=")
        return () if work_out(expression) is None else (f"<{expression}>",)


def work_out(expression: str) -> int | None:
    """The value of integers joined by `+`, `-` and `*`, which binds tighter; None for anything else.

    Nothing is ever evaluated as code. Parentheses are not known, and an expression of more than `LONGEST` characters
    is none.
    """
    if len(expression) > LONGEST or not _EXPRESSION.fullmatch(expression):
        return None
    terms = _TERM.findall(re.sub(r"\s", "", expression))
    return sum((-1 if sign == "-" else 1) * math.prod(map(int, product.split("*"))) for sign, product in terms)
