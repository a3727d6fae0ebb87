"""Pydantic's errors as user errors with file, key, value and expectation."""

import difflib
import json
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from configs import losses
from configs.errors import ConfigError, UserError
from configs.schema import dotted_fields
from configs.section import Parameters, Section, choices, holds_sections, is_section

_KINDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", types.NoneType: "null"}
_LONGEST_SHOWN = 80
_FIELDS = dotted_fields(with_parameters=True)
_NAME = "[key]"
"""Pydantic's mark for an invalid name in a mapping, as opposed to an invalid value."""


def mistakes(error: ValidationError, *, file: str, overridden: Collection[str], option: str) -> Iterator[UserError]:
    """Yield each finding in `error`; keys in `overridden` came from `option`, the others from `file`."""
    for detail in error.errors():
        path, choice = _without_choice(detail["loc"])
        key = ".".join(str(part) for part in path if part != _NAME)
        reason = detail.get("ctx", {}).get("error")
        if isinstance(reason, ConfigError):
            where = f"{file} with {option}" if overridden else file
            for impossible in reason.mistakes:
                yield UserError(**(impossible.fields() | {"file": where}))
            continue
        where = option if any(f"{key}.".startswith(f"{changed}.") for changed in overridden) else file
        if detail["type"] == "extra_forbidden":
            yield unknown_key(key, where, choice)
        elif path[-1] == _NAME:
            yield UserError(file=where, key=key, read="not settable", expected=str(reason))
        elif detail["type"] == "missing":
            yield UserError(file=where, key=key, read="missing", expected=_expectation(key))
        else:
            yield UserError(file=where, key=key, read=show(detail["input"]), expected=str(reason or _expectation(key)))


def _without_choice(path: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], type[Parameters] | None]:
    """The path of a key without pydantic's marks of a loss, and the parameters of that loss."""
    match path:
        case ("training", "loss", losses.OWN, *rest):
            return ("training", "loss", *rest), losses.OwnLossConfig
        case ("training", "loss", losses.BUILT_IN, str() as name, *rest):
            return ("training", "loss", *rest), losses.PARAMETERS[name]
    return path, None


def unknown_key(key: str, file: str, choice: type[Parameters] | None = None) -> UserError:
    """The error for a key of `file` that does not exist; expected is the one probably meant, or one of the `choice`."""
    names = list(choice.model_fields if choice else _in_named_section(key)) or [_nearest(key) or ""]
    if not names[0]:
        names = _siblings(_split(key)[0]) or _siblings("")
    expected = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    return UserError(file=file, key=key, read="an unknown key", expected=expected)


def show(value: object) -> str:
    """A YAML value as people read it, shortened."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[: _LONGEST_SHOWN - 1]}…"


def _nearest(key: str) -> str | None:
    """The key probably meant: the right name in the wrong section, a misspelt sibling, another key, a similar one."""
    keys = list(_FIELDS)
    section, name = _split(key)
    for candidates, cutoff in ((keys, 1.0), (_siblings(section), 0.6), (keys, 0.75)):
        names = {_split(candidate)[1] for candidate in candidates}
        for meant in difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff):
            same_name = [candidate for candidate in candidates if _split(candidate)[1] == meant]
            return difflib.get_close_matches(key, same_name, n=1, cutoff=0.0)[0]
    return next(iter(difflib.get_close_matches(key, keys, n=1, cutoff=0.8)), None)


def _split(key: str) -> tuple[str, str]:
    section, _, name = key.rpartition(".")
    return section, name


def _siblings(section: str) -> list[str]:
    return [key for key in _FIELDS if _split(key)[0] == section]


def _in_named_section(key: str) -> dict[str, FieldInfo]:
    """The fields of the section that `key` is in, by name; empty unless that is in a mapping of sections."""
    mapping, _, _ = _split(key)[0].rpartition(".")
    field = _FIELDS.get(mapping)
    if field is None or not holds_sections(field.annotation):
        return {}
    section: type[Section] = get_args(field.annotation)[1]
    return section.model_fields


def _expectation(key: str) -> str:
    """Describe in words the values that the schema allows at `key`."""
    section, name = _split(key)
    if name.isdecimal() and section in _FIELDS:
        # An item of a list.
        return _expectation(section)
    field = _FIELDS.get(key) or _in_named_section(key).get(name)
    if field is None:
        # A name in a mapping.
        below: type = get_args(_FIELDS[section].annotation)[1]
        if not is_section(below):
            return _phrase(below)
        required = [name for name, field in below.model_fields.items() if field.is_required()]
        return f"a section with {', '.join(required)}"
    if is_section(field.annotation):
        required = [
            name for name, below in dotted_fields().items() if name.startswith(f"{key}.") and below.is_required()
        ]
        return f"a section with {', '.join(required)}" if required else "a section with its own keys"
    if kinds := choices(field.annotation):
        return "a name, or a section with a name and parameters" if len(kinds) > 1 else "a section with its own keys"
    return _phrase(field.annotation, field.metadata)


def _phrase(annotation: object, rules: Sequence[object] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _phrase(arguments[0], getattr(arguments[1], "metadata", ()))
    if origin in (Union, types.UnionType):
        return " or ".join(_phrase(member) for member in arguments)
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in arguments)
    if origin is dict:
        return "a section with names and values"
    if origin is list:
        return f"a list such as [a, b], whose items are {_phrase(arguments[0])}"
    bounds = " and ".join(_bounds(rules))
    return f"{_KINDS[annotation]} {bounds}".rstrip()  # type: ignore[index]


def _bounds(rules: Sequence[object]) -> Iterator[str]:
    for rule in rules:
        match rule:
            case annotated_types.Ge(ge=limit):
                yield f"of at least {limit}"
            case annotated_types.Gt(gt=limit):
                yield f"above {limit}"
            case annotated_types.Le(le=limit):
                yield f"at most {limit}"
            case annotated_types.MinLen():
                yield "of at least one character"
