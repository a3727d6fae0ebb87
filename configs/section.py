"""The base class of all config sections, and their kinds of numbers and text."""

from typing import Annotated, TypeGuard, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Replicas = Annotated[int, Field(ge=1, le=64)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: frozen, strict, no unknown keys; a field's docstring is its description."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def is_section(annotation: object) -> TypeGuard[type[Section]]:
    """Whether a field of this type is a section."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def is_mapping(annotation: object) -> bool:
    """Whether a field of this type has names that the schema does not list."""
    return get_origin(annotation) is dict


def holds_sections(annotation: object) -> bool:
    """Whether a field of this type has a section under each name."""
    return is_mapping(annotation) and is_section(get_args(annotation)[1])
