"""Texts and conversations of a user's data, checked before anything else reads them.

A message is what chat templates take: an object with `role` and `content`, and of an assistant perhaps `tool_calls`.
`where` names the file and the line or row in errors.
"""

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from millrace.errors import PromptsError
from millrace.types import Demonstration, Message
from storage.json_text import parse_json

_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which data sets and templates keep the thought before a turn."""
_MARKS = ("weight", "loss_mask", "trainable", "train")
"""Keys that say whether a turn is trained, in the formats of OpenAI and of training libraries."""
_KEYS = ("role", "content", "name", *REASONING, "tool_calls", "tool_call_id", *_MARKS)


class WrittenNumber(float):
    """A JSON number that keeps its text, such as 3.50."""

    def __init__(self, text: str) -> None:
        self.text = text


def checked_text(record: Mapping[str, object], key: str, where: str, expected: str = "text that is not empty") -> str:
    """The text under `key`. Raises PromptsError if it is missing, no text, empty, or not Unicode."""
    if key not in record:
        raise PromptsError("missing", file=where, key=key, expected="text")
    value = record[key]
    if not isinstance(value, str) or not value:
        raise PromptsError(shown(value), file=where, key=key, expected=expected)
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise PromptsError("text with half a surrogate pair", file=where, key=key, expected="Unicode text")
    return value


def checked_text_or_number(record: Mapping[str, object], key: str, where: str) -> str:
    """Like `checked_text`, but a number is text too: as it is written, or its decimal digits."""
    match record.get(key):
        case bool():
            pass
        case int() as value:
            return str(value)
        case WrittenNumber() as value:
            return value.text
        case Decimal() as value:
            return f"{value:f}"
    return checked_text(record, key, where, "text that is not empty, or a number")


def parse_unique(data: bytes | str, **hooks: Any) -> Any:
    """The value in JSON, as `parse_json`. Raises ValueError also for an object with a key twice."""
    return parse_json(data, object_pairs_hook=_object, **hooks)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {shown(twice)} stands twice in {shown(values)}")
    return values


def shown(value: object) -> str:
    """A value as JSON, cut to 40 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:39]}…"


def templated(template: str | None, text: str) -> str:
    """Returns the template with `text` in place of `{prompt}`; without a template, `text`."""
    return text if template is None else text.join(template.split("{prompt}"))


def parsed_messages(value: object, where: str) -> object:
    """The list in `value` if that is JSON text of messages, as CSV has them; otherwise `value`.

    Raises PromptsError for messages in another notation, such as Python's.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        parsed = parse_unique(value)
    except ValueError as error:
        if _LIKE_MESSAGES.match(value):
            raise PromptsError(
                f"{shown(value)} is not JSON ({error})", file=where, expected="a list of messages"
            ) from error
        return value
    is_conversation = parsed and all(isinstance(item, dict) and "role" in item for item in parsed)
    return parsed if is_conversation else value


def checked_messages(value: object, where: str) -> tuple[Message, ...]:
    """A conversation that an assistant's turn may follow: at least one message, the last one not an assistant's.

    Parts of text are joined; the arguments of tool calls become objects. Raises PromptsError for anything else.
    """
    messages = tuple(message for message, _ in _messages(value, where))
    if messages[-1]["role"] == "assistant":
        raise PromptsError(
            "the assistant's", file=where, key="the last message", expected="one for the policy to answer"
        )
    return messages


def checked_demonstration(value: object, where: str) -> tuple[tuple[Message, ...], Demonstration]:
    """A conversation that the assistant ends: the messages before its first trained turn, at least one, and the rest.

    Messages after the last trained turn are left out. Raises PromptsError for anything else.
    """
    messages, trained = zip(*_messages(value, where), strict=True)
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        read = f"the {roles[-1]}'s"
        raise PromptsError(read, file=where, key="the last message", expected="a turn of the assistant to learn from")
    turns = [n for n, role in enumerate(roles) if role == "assistant"]
    learned = [n for n in turns if trained[n]]
    if not learned:
        raise PromptsError("not trained", file=where, key="each turn of the assistant", expected="one to learn from")
    first, last = learned[0], learned[-1]
    if first == 0:
        raise PromptsError("the assistant's", file=where, key="the first message", expected="one that it answers")
    if doubled := [n for n in range(1, len(roles)) if roles[n - 1] == roles[n] == "assistant"]:
        expected = "one of another between its turns"
        raise PromptsError("the assistant's too", file=where, key=f"message {doubled[0] + 1}", expected=expected)
    unlearned = tuple(n - first for n in turns if first < n < last and not trained[n])
    return messages[:first], Demonstration(messages=messages[first : last + 1], unlearned=unlearned)


def checked_tools(value: object, where: str) -> tuple[Message, ...]:
    """Descriptions of functions, as chat templates take them: `{"type": "function", "function": {"name": …}}`.

    `value` may be JSON text. Raises PromptsError for anything else.
    """
    tools = _parsed(value, where, "the list of tools", "a list of functions")
    if not isinstance(tools, list):
        raise PromptsError(shown(tools), file=where, key="the list of tools", expected="a list of functions")
    for tool in tools:
        if _function(tool) is None:
            expected = 'one with a name, {"type": "function", "function": {"name": …}}'
            raise PromptsError(shown(tool), file=where, key="a tool", expected=expected)
    return tuple(_without_nulls(tool) for tool in tools)


def _messages(value: object, where: str) -> tuple[tuple[Message, bool], ...]:
    """(message without marks, whether its turn is trained) of each."""
    if not isinstance(value, list) or not value:
        raise PromptsError(shown(value), file=where, key="the conversation", expected="a list of at least one message")
    return tuple(_message(item, f"{where} message {number}") for number, item in enumerate(value, start=1))


def _message(value: object, where: str) -> tuple[Message, bool]:
    if not isinstance(value, Mapping):
        raise PromptsError(shown(value), file=where, key="the message", expected="an object with role and content")
    # Columns of Parquet files give every message every key, most of them null.
    message = _without_nulls(value)
    role, calls, content = message.get("role"), message.get("tool_calls"), message.get("content")
    if role not in ROLES:
        raise PromptsError(shown(role), file=where, key="role", expected=f"one of {', '.join(ROLES)}")
    if unknown := [key for key in message if key not in _KEYS]:
        raise PromptsError("unknown", file=where, key=shown(unknown[0]), expected=f"one of {', '.join(_KEYS)}")
    marks = {key: message.pop(key) for key in _MARKS if key in message}
    for key, mark in marks.items():
        if mark not in (0, 1):
            raise PromptsError(shown(mark), file=where, key=key, expected="0 or 1")
    if calls and role != "assistant":
        raise PromptsError(f"set by the {role}", file=where, key="tool_calls", expected="calls by the assistant only")
    if calls:
        message["tool_calls"] = [_call(call, where) for call in calls]
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise PromptsError(
                    shown(part), file=where, key="a part of content", expected="text, the only kind read"
                )
        content = "".join(checked_text(part, "text", where) for part in content)
    content = checked_text({"content": content}, "content", where) if content or not calls else ""
    return {**message, "content": content}, all(marks.values())


def _call(call: Any, where: str) -> dict[str, Any]:
    function = _function(call)
    if function is None:
        raise PromptsError(shown(call), file=where, key="a tool call", expected="one with function.name")
    arguments = _parsed(function.get("arguments", {}), where, "arguments of a tool call", "an object")
    if not isinstance(arguments, Mapping):
        raise PromptsError(shown(arguments), file=where, key="arguments of a tool call", expected="an object")
    return {"type": "function", **call, "function": {**function, "arguments": dict(arguments)}}


def _function(value: object) -> Mapping[str, Any] | None:
    """The function of a tool or a call; None if it has no name."""
    function = value.get("function") if isinstance(value, Mapping) else None
    return function if isinstance(function, Mapping) and isinstance(function.get("name"), str) else None


def _parsed(value: object, where: str, key: str, expected: str) -> object:
    """The value itself, or the value in JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_unique(value)
    except ValueError as error:
        raise PromptsError(f"not JSON ({error})", file=where, key=key, expected=expected) from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
