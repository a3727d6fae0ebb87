"""The calculator as a tool of a conversation: the model calls a function, and a message has the result."""

from millrace.chat.base import ToolCall, Turn
from millrace.generation.environments.base import ChatEnvironment, Observation
from millrace.generation.environments.calculator import work_out
from millrace.types import Message, Prompt

_NAME = "calculator"


class CalculatorTool(ChatEnvironment):
    """Answers each call of `calculator(expression)` with the value, or with what is wrong with the call.

    A turn without a call is the policy's answer.
    """

    tools = (
        {
            "type": "function",
            "function": {
                "name": _NAME,
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
    message = {"role": "tool", "name": _NAME, "content": _result(call)}
    return message if call.id is None else {**message, "tool_call_id": call.id}


def _result(call: ToolCall) -> str:
    if call.problem is not None:
        return f"error: {call.problem}"
    if call.name != _NAME:
        return f"error: there is no function {call.name}"
    expression = call.arguments.get("expression")
    value = work_out(expression) if isinstance(expression, str) else None
    return "error: expected integers joined by +, - and *" if value is None else str(value)
