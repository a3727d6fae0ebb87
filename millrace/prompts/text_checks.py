"""Checks of the text in user data, made before anything else reads it."""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from millrace.errors import PromptsError
from storage.json_text import parse_json


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
    """As `checked_text`, but a number is text too: as it is written, or its decimal digits."""
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
