"""Pydantic's errors as user errors with file, key, value and expectation."""

import difflib
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from pydantic import ValidationError

from configs import losses
from configs.errors import ConfigError, UserError
from configs.other_names import key_here
from configs.schema import OF_SOURCE, known_fields, schema_key
from configs.section import Section
from configs.task import EvaluationSetConfig
from configs.training import TeacherConfig

_LONGEST_SHOWN = 80
_FIELDS = known_fields()
_NAME = "[key]"
"""Pydantic's mark for an invalid name in a mapping, as opposed to an invalid value."""
_EXPECTED = {
    "model_type": "a section with its own keys",
    "dict_type": "a section with names and values",
    "union_tag_not_found": "a name, or a section with a name and parameters",
}
"""Expected values by pydantic's type of error, where its message uses words of Python."""


def mistakes(error: ValidationError, *, file: str, overridden: Collection[str], option: str) -> Iterator[UserError]:
    """Yield each finding in `error`; keys in `overridden` came from `option`, the others from `file`."""
    for detail in error.errors():
        path, section = _without_choice(detail["loc"])
        key = ".".join(str(part) for part in path if part != _NAME)
        reason = detail.get("ctx", {}).get("error")
        if isinstance(reason, ConfigError):
            where = f"{file} with {option}" if overridden else file
            for impossible in reason.mistakes:
                yield UserError(**(impossible.fields() | {"file": where}))
            continue
        where = option if any(f"{key}.".startswith(f"{changed}.") for changed in overridden) else file
        expected = str(reason or _expected(detail["type"], detail["msg"]))
        if detail["type"] == "extra_forbidden":
            yield unknown_key(key, where, section)
        elif path[-1] == _NAME:
            yield UserError(file=where, key=key, read="not settable", expected=expected)
        elif detail["type"] == "missing":
            yield UserError(file=where, key=key, read="missing", expected="a value: it has no default")
        else:
            yield UserError(file=where, key=key, read=show(detail["input"]), expected=expected)


def _without_choice(path: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], type[Section] | None]:
    """Returns the path of a key without pydantic's marks of a loss, and the section that it is in if not listed."""
    match path:
        case ("training", "loss", losses.OWN, *rest):
            return ("training", "loss", *rest), losses.OwnLossConfig
        case ("training", "loss", losses.BUILT_IN, str() as name, *rest):
            return ("training", "loss", *rest), losses.PARAMETERS[name]
        case ("evaluation", "sets", _, _, *_):
            return path, EvaluationSetConfig
        case ("teachers", _, _, *_):
            return path, TeacherConfig
        case ("sources", source, *of_source):
            own, section = _without_choice(tuple(of_source))
            return ("sources", source, *own), section
    return path, None


def _expected(kind: str, message: str) -> str:
    """The expectation in pydantic's message, such as `Input should be greater than or equal to 1`."""
    return _EXPECTED.get(kind) or re.sub(r"^\w+ should (be )?", "", message)


def unknown_key(key: str, file: str, section: type[Section] | None = None) -> UserError:
    """The error for a key of `file` that does not exist; expected is the one probably meant, or one of the section."""
    known = schema_key(key)
    parent, _, name = known.rpartition(".")
    names = list(section.model_fields) if section else []
    if not names:
        # The right name in a wrong section, a similar key, or any key of the section.
        in_source = known.startswith(OF_SOURCE)
        fields = [candidate for candidate in _FIELDS if candidate.startswith(OF_SOURCE) == in_source]
        namesakes = [candidate for candidate in fields if candidate.rpartition(".")[2] == name]
        other = key_here(known)
        in_fields = f"{OF_SOURCE}{other}" if in_source and f"{OF_SOURCE}{other}" in _FIELDS else other
        names = [in_fields] if in_fields else difflib.get_close_matches(known, namesakes, n=1, cutoff=0.0)
        names = names or difflib.get_close_matches(known, fields, n=1, cutoff=0.75)
        names = names or [candidate for candidate in fields if candidate.rpartition(".")[0] == parent]
        names = names or [candidate for candidate in fields if "." not in candidate]
        # As the user wrote it, with the source's name.
        names = [candidate.replace(known.removesuffix(name), key.removesuffix(name)) for candidate in names]
    expected = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    return UserError(file=file, key=key, read="an unknown key", expected=expected)


def show(value: Any) -> str:
    """A YAML value as people read it, shortened."""
    if value is None:
        return "empty"
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[: _LONGEST_SHOWN - 1]}…"
