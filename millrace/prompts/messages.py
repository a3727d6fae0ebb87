"""Texts and conversations of a user's data, checked before anything else reads them.

A message is what chat templates take: an object with `role` and `content`, and of an assistant perhaps `tool_calls`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from millrace.errors import PromptsError
from millrace.types import Message
from storage.json_text import parse_json

_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
ROLES = ("system", "developer", "user", "assistant", "tool")


class WrittenNumber(float):
    """A number that knows how it is written."""

    def __init__(self, text: str) -> None:
        self.text = text
        """Such as 3.50."""


def checked_text(record: Mapping[str, object], key: str, where: str, expected: str = "text that is not empty") -> str:
    """The text under `key`. Raises PromptsError with `where`, if it is missing, no text, empty, or not Unicode."""
    if key not in record:
        raise PromptsError(f'{where}: key "{key}" is missing; expected text')
    value = record[key]
    if not isinstance(value, str) or not value:
        raise PromptsError(f'{where}: key "{key}" is {shown(value)}; expected {expected}')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise PromptsError(f'{where}: key "{key}" holds half a surrogate pair; expected Unicode text')
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
    if template is None:
        return text
    before, _, after = template.partition("{prompt}")
    return before + text + after


def parsed_messages(value: object, where: str) -> object:
    """The list in `value` if that is JSON text of messages, as CSV has them; otherwise `value`.

    Raises PromptsError, beginning with `where`, for messages in another notation, such as Python's.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        parsed = parse_unique(value)
    except ValueError as error:
        if _LIKE_MESSAGES.match(value):
            raise PromptsError(f"{where}: {shown(value)} is not JSON ({error}); expected a list of messages") from error
        return value
    of_messages = (
        isinstance(parsed, list) and parsed and all(isinstance(item, dict) and "role" in item for item in parsed)
    )
    return parsed if of_messages else value


def checked_messages(value: object, where: str) -> tuple[Message, ...]:
    """A conversation that an assistant's turn may follow: at least one message, the last one not an assistant's.

    Parts of text are joined; the arguments of tool calls become objects. Raises PromptsError, beginning with `where`,
    for anything else.
    """
    if not isinstance(value, list) or not value:
        raise PromptsError(f"{where}: the conversation is {shown(value)}; expected a list of at least one message")
    messages = tuple(_message(item, f"{where} message {number}") for number, item in enumerate(value, start=1))
    if messages[-1]["role"] == "assistant":
        raise PromptsError(f"{where}: the last message is the assistant's; expected one for the policy to answer")
    return messages


def checked_tools(value: object, where: str) -> tuple[Message, ...]:
    """Descriptions of functions, as chat templates take them: `{"type": "function", "function": {"name": …}}`.

    `value` may be JSON text. Raises PromptsError, beginning with `where`, for anything else.
    """
    if isinstance(value, str):
        try:
            value = parse_unique(value)
        except ValueError as error:
            raise PromptsError(f"{where}: the tools are not JSON ({error}); expected a list of functions") from error
    if not isinstance(value, list):
        raise PromptsError(f"{where}: the tools are {shown(value)}; expected a list of functions")
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise PromptsError(
                f"{where}: the tool {shown(tool)} has no name; "
                'expected {"type": "function", "function": {"name": …}}'
            )
    return tuple(_without_nulls(tool) for tool in value)


def last_text(messages: Sequence[Message]) -> str:
    """The content of the last message: the prompt, for a reward."""
    return str(messages[-1]["content"])


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise PromptsError(f"{where}: {shown(value)}; expected an object with role and content")
    # Columns of Parquet files give every message every key, most of them null.
    message = _without_nulls(value)
    role = message.get("role")
    if role not in ROLES:
        raise PromptsError(f"{where}: the role is {shown(role)}; expected one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise PromptsError(f"{where}: a message of the {role} has tool calls; expected them of the assistant only")
    if calls:
        message["tool_calls"] = [_call(call, where) for call in calls]
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if content is None and calls:
        content = ""
    if calls and content == "":
        return {**message, "content": ""}
    return {**message, "content": checked_text({"content": content}, "content", where)}


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise PromptsError(f"{where}: a part of its content is {shown(part)}; expected text, as nothing else is read")
    return checked_text(part, "text", where)


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptsError(f"{where}: the tool call {shown(call)} names no function; expected function.name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse_unique(arguments)
        except ValueError as error:
            raise PromptsError(
                f"{where}: the arguments of its tool call, {shown(arguments)}, are not JSON ({error}); "
                "expected an object"
            ) from error
    if not isinstance(arguments, Mapping):
        raise PromptsError(f"{where}: the arguments of its tool call are {shown(arguments)}; expected an object")
    return {"type": "function", **call, "function": {**function, "arguments": dict(arguments)}}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
