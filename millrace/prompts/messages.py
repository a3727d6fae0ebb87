"""Conversations of a user's data, checked before anything else reads them.

A message is what chat templates take: an object with `role` and `content`, and of an assistant perhaps `tool_calls`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import PromptsError
from millrace.prompts.text_checks import checked_text, parse_unique, shown
from millrace.types import Message

_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
ROLES = ("system", "developer", "user", "assistant", "tool")


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
    of_messages = isinstance(parsed, list) and parsed and all(isinstance(one, dict) and "role" in one for one in parsed)
    return parsed if of_messages else value


def checked_messages(value: object, where: str) -> tuple[Message, ...]:
    """A conversation that an assistant's turn may follow: at least one message, the last one not an assistant's.

    Parts of text are joined; the arguments of tool calls become objects. Raises PromptsError, beginning with `where`,
    for anything else.
    """
    if not isinstance(value, list) or not value:
        raise PromptsError(f"{where}: the conversation is {shown(value)}; expected a list of at least one message")
    messages = tuple(_message(one, f"{where} message {number}") for number, one in enumerate(value, start=1))
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
    """The content of the last message, which is what a reward calls the prompt."""
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
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
