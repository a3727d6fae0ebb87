"""The base class of all config sections, and their kinds of numbers and text."""

import json
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network
from types import UnionType
from typing import Annotated, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from configs.other_names import ALGORITHMS

Count = Annotated[int, Field(ge=1)]
Replicas = Annotated[int, Field(ge=1, le=1024)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: frozen, strict, no unknown keys; a field's docstring is its description."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Parameters(Section):
    """Base of the parameters of one choice, such as a loss: a small separate schema, and one key of the run."""


def ipv4_network(text: str) -> str:
    """Return `text`. Raises ValueError, whose text is the expectation, if it is not an IPv4 network."""
    try:
        IPv4Network(text)
    except ValueError as error:
        raise ValueError("an IPv4 network such as 10.0.0.0/24") from error
    return text


def one_of_or_path(names: Sequence[str]) -> Callable[[str], str]:
    """A check of a field that holds one of `names`, or `package.module:function`."""

    def check(value: str) -> str:
        module, _, function = value.partition(":")
        if value not in names and (settings := ALGORITHMS.get(value.lower().replace("-", "_"))):
            raise ValueError(f"the settings that make this algorithm: {settings}")
        if value not in names and not (module and function):
            choices = " or ".join(json.dumps(name) for name in names)
            raise ValueError(f"{choices} or package.module:function")
        return value

    return check


def is_section(annotation: object) -> TypeGuard[type[Section]]:
    """Whether a field of this type is a section, whose fields are keys."""
    return isinstance(annotation, type) and issubclass(annotation, Section) and not issubclass(annotation, Parameters)


def choices(annotation: object) -> tuple[type[Parameters], ...]:
    """The parameters that a field of this type may hold: one kind, or one of several; empty for another field."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return tuple(kind for member in get_args(annotation) for kind in choices(member))
    return (annotation,) if isinstance(annotation, type) and issubclass(annotation, Parameters) else ()
