"""A calculator as an environment: of text, for the expression between < and >, and as the tool of a conversation."""

import math
import re
from collections.abc import Sequence

from millrace.chat.base import ToolCall, Turn
from millrace.generation.environments.base import ChatEnvironment, Environment, Observation
from millrace.types import Message, Prompt

LONGEST = 64
"""Most characters of an expression, which keeps every product small."""
_TOOL = "calculator"
_NUMBER = r"[0-9]+"
_EXPRESSION = re.compile(rf"\s*-?\s*{_NUMBER}(\s*[-+*]\s*{_NUMBER})*\s*")
_TERM = re.compile(rf"([+-]?)({_NUMBER}(?:\*{_NUMBER})*)")


class Calculator(Environment):
    """Answers a turn that ends with a call, such as `<12+34>`, with `46|`, or `?|` for an invalid expression.

    A turn that ends without a call is the policy's answer.
    """

    stop = (">",)
    alphabet = "0123456789+-*<>|?"

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Does nothing: a calculator has no state."""

    def step(self, text: str) -> Observation:
        """The value of the expression after the last `<`, where the turn ends with `>`."""
        if not text.endswith(">"):
            return Observation(done=True)
        _, call, expression = text[:-1].rpartition("<")
        value = work_out(expression) if call else None
        return Observation(text="?|" if value is None else f"{value}|")

    def example(self, prompt: Prompt) -> Sequence[str]:
        """One call with the prompt's expression, if it is one: `<12+34>` for `12+34=`."""
        expression = prompt.text.removesuffix("=")
        return () if work_out(expression) is None else (f"<{expression}>",)


class CalculatorTool(ChatEnvironment):
    """Answers each call of `calculator(expression)` with the value, or with the error in the call.

    A turn without a call is the policy's answer.
    """

    tools = (
        {
            "type": "function",
            "function": {
                "name": _TOOL,
                "description": "Works out integers joined by +, - and *.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "such as 12+34"}},
                    "required": ["expression"],
                },
            },
        },
    )

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Does nothing: a calculator has no state."""

    def step(self, turn: Turn) -> Observation:
        """One message per call; done if there is none."""
        return Observation(done=not turn.tool_calls, messages=tuple(_answer(call) for call in turn.tool_calls))


def _answer(call: ToolCall) -> Message:
    value = work_out(str(call.arguments.get("expression")))
    if call.problem is not None:
        content = f"error: {call.problem}"
    elif call.name != _TOOL:
        content = f"error: unknown function {call.name}"
    else:
        content = "error: expected integers joined by +, - and *" if value is None else str(value)
    message = {"role": "tool", "name": _TOOL, "content": content}
    return message if call.id is None else {**message, "tool_call_id": call.id}


def work_out(expression: str) -> int | None:
    """The value of integers joined by `+`, `-` and `*`, without parentheses; None for anything else.

    Nothing is evaluated as code. More than `LONGEST` characters are not an expression.
    """
    if len(expression) > LONGEST or not _EXPRESSION.fullmatch(expression):
        return None
    terms = _TERM.findall(re.sub(r"\s", "", expression))
    return sum((-1 if sign == "-" else 1) * math.prod(map(int, product.split("*"))) for sign, product in terms)
