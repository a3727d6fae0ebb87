"""JSON from files that anyone may have written."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from storage.errors import StreamCorrupt

_T = TypeVar("_T")
RESTORE = "restore this file from a copy of the run"
"""What to do about a damaged record."""
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def parse_json(data: bytes | str, **hooks: Any) -> Any:
    """The value in `data`, made with the `hooks` of `json.loads`. Raises ValueError for anything else, and for
    text that is not UTF-8, numbers of thousands of digits, and values nested thousands deep.
    """
    try:
        return json.loads(data, **hooks)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def parse_as(kind: type[_T], data: bytes | dict[str, Any], path: str, advice: str = RESTORE) -> _T:
    """Parses the content of the file `path`, JSON or already parsed, as `kind`, such as a dataclass.

    Raises StreamCorrupt, with the first mistake and `advice`, unless it has exactly the fields and types of `kind`.
    """
    text = json.dumps(data) if isinstance(data, dict) else data
    try:
        value: _T = _adapter(kind).validate_json(text, strict=True, extra="forbid")
        return value
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        key = "".join(f"{name}: " for name in first["loc"])
        raise StreamCorrupt(path, f"unexpected content: {key}{first['msg']}; {advice}") from error
