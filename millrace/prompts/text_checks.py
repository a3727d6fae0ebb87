"""Checks of the text in user data, made before anything else reads it."""

import json
from collections.abc import Mapping

from millrace.errors import PromptsError


def checked_text(record: Mapping[str, object], key: str, where: str) -> str:
    """The text under `key`. Raises PromptsError with `where`, if it is missing, no text, empty, or not Unicode."""
    if key not in record:
        raise PromptsError(f'{where}: key "{key}" is missing; expected text')
    value = record[key]
    if not isinstance(value, str) or not value:
        raise PromptsError(f'{where}: key "{key}" is {shown(value)}; expected text that is not empty')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise PromptsError(f'{where}: key "{key}" holds half a surrogate pair; expected Unicode text')
    return value


def checked_text_or_int(record: Mapping[str, object], key: str, where: str) -> str:
    """As `checked_text`, but a whole number is its decimal digits."""
    value = record.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return checked_text(record, key, where)


def shown(value: object) -> str:
    """A value as JSON, cut to 40 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:39]}…"
