"""Loads a `RunConfig` from a YAML file and `--set` overrides, and compares two configs of a run."""

import json
import os
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from pydantic import ValidationError

from configs.errors import ConfigError
from configs.schema import RunConfig, dotted_fields
from configs.section import holds_sections, is_list, is_mapping, is_section
from configs.stored import put_key
from configs.strict_yaml import parse_document, parse_scalar
from configs.validation_errors import sentences, show, unknown_key

_LEAVES = frozenset(key for key, field in dotted_fields().items() if not is_section(field.annotation))
_LISTS = frozenset(key for key, field in dotted_fields().items() if is_list(field.annotation))
_MAPPINGS = frozenset(key for key, field in dotted_fields().items() if is_mapping(field.annotation))
_MAPPINGS_OF_SECTIONS = frozenset(key for key, field in dotted_fields().items() if holds_sections(field.annotation))

# How long, where and how fast a run continues. None of these changes what a committed trajectory or step means. The
# number of ranks and the size of microbatches change only the last bits of a gradient; its number format changes more.
# What became of tokens that were too old, and of groups without spread, is stored with each step.
_FREE_KEYS = {
    "scoring.workers", "staleness.too_old", "training.max_steps", "training.checkpoint_every",
    "training.checkpoint_minutes", "training.checkpoint_keep", "training.device", "training.activation_checkpointing",
    "training.max_tokens_per_microbatch", "training.selection.drop_zero_advantage", "training.on_collapse",
}  # fmt: skip
_FREE_SECTIONS = (
    "training.parallel.", "weights.", "storage.", "evaluation.", "promotion.", "budget.", "supervision.", "placement.",
    "plan.",
)  # fmt: skip
_FREE_ON_RESUME = frozenset(
    key for key in _LEAVES if key in _FREE_KEYS or key.endswith(".threads") or key.startswith(_FREE_SECTIONS)
)

IMMUTABLE_ON_RESUME = _LEAVES - _FREE_ON_RESUME
"""Settings that define the run cannot change on resume: their dotted keys."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, option: str = "--set") -> RunConfig:
    """Read the YAML file at `path`, apply each `section.key=value` of `overrides` (the last one wins), and validate.

    `option` names in errors where the overrides are from.

    Raises ConfigError with one sentence per error, each on its own line.
    """
    file = os.fspath(path)
    return with_overrides(_read_mapping(file), overrides, where=file, option=option)


def with_overrides(
    values: dict[str, object], overrides: Sequence[str], *, where: str, option: str = "--set"
) -> RunConfig:
    """The config of `values`, sections with their keys, changed by each `section.key=value`, and validated.

    `values` themselves are changed too. Raises ConfigError with one sentence per error, each on its own line; it
    names `where` the values are from, and the `option` that the overrides are from.
    """
    errors: list[str] = []
    overridden: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            errors.append(f"{option}: found {show(override)}; expected section.key=value")
        elif key not in _LEAVES and not _is_in_mapping(key):
            errors.append(f"{option}: {_not_a_leaf(key)}")
        else:
            try:
                put_key(values, key, parse_document(text) if _is_nested(key, text) else parse_scalar(text))
            except ValueError as error:
                errors.append(f"{option}: {key} is {show(text)}; expected one YAML value ({error})")
            overridden.add(key)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        errors.extend(sentences(error, file=where, overridden=overridden, option=option))
        raise ConfigError("\n".join(errors)) from error
    if errors:
        raise ConfigError("\n".join(errors))
    return config


def changed_immutably(old: RunConfig, new: RunConfig) -> list[str]:
    """One sentence per key that differs between `old` and `new` but must not change when a run is resumed."""
    values = [(key, attrgetter(key)(old), attrgetter(key)(new)) for key in sorted(IMMUTABLE_ON_RESUME)]
    return [
        f"{key} was {json.dumps(before)} and is {json.dumps(after)}; expected a resumed run to keep it"
        for key, before, after in values
        if before != after
    ]


def _read_mapping(file: str) -> dict[str, object]:
    try:
        document = parse_document(Path(file).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8; expected a YAML file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file}: can't be read ({error.strerror}); expected a YAML file") from error
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; expected a YAML file") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: the file is {show(document)}; expected sections with their keys")
    return document


def _is_in_mapping(key: str) -> bool:
    parent, _, _ = key.rpartition(".")
    return parent in _MAPPINGS or parent.rpartition(".")[0] in _MAPPINGS_OF_SECTIONS


def _is_nested(key: str, text: str) -> bool:
    """Whether `text` is a list or a mapping, and not a pattern in which brackets are characters."""
    return text[:1] in ("[", "{") and (key in _LISTS | _MAPPINGS or key.rpartition(".")[0] in _MAPPINGS)


def _not_a_leaf(key: str) -> str:
    if key in dotted_fields():
        return f"{key} is a section; expected section.key=value with one of its keys"
    return unknown_key(key)
