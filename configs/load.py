"""From a YAML file and `--set` overrides to a `RunConfig`, and what two configs of one run may differ in."""

import hashlib
import json
import os
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from pydantic import ValidationError

from configs.errors import ConfigError
from configs.mistakes import sentences, show, unknown_key
from configs.schema import RunConfig, dotted_fields
from configs.section import is_mapping, is_section
from configs.strict_yaml import parse_document, parse_scalar

_LEAVES = frozenset(key for key, field in dotted_fields().items() if not is_section(field.annotation))
_MAPPINGS = frozenset(key for key, field in dotted_fields().items() if is_mapping(field.annotation))

# How long, where and how fast a run goes on; none of these changes what a committed rollout or step means. Over how
# many ranks and in what portions a gradient is summed up changes its last bits only; in what type, more than that.
_FREE_KEYS = {
    "scoring.workers", "training.max_steps", "training.checkpoint_every", "training.device",
    "training.activation_checkpointing", "training.max_tokens_per_microbatch",
}  # fmt: skip
_FREE_SECTIONS = (
    "training.parallel.", "weights.", "storage.", "evaluation.", "promotion.", "budget.", "supervision.", "placement.",
)  # fmt: skip
_FREE_ON_RESUME = frozenset(
    key for key in _LEAVES if key in _FREE_KEYS or key.endswith(".threads") or key.startswith(_FREE_SECTIONS)
)

IMMUTABLE_ON_RESUME = _LEAVES - _FREE_ON_RESUME
"""Dotted keys that must keep their values when a run is resumed."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read the YAML file at `path`, apply each `section.key=value` of `overrides` (the last one wins), and validate.

    Raises ConfigError with every mistake found, one sentence a line.
    """
    file = os.fspath(path)
    return with_overrides(_read_mapping(file), overrides, where=file)


def with_overrides(values: dict[str, object], overrides: Sequence[str], *, where: str) -> RunConfig:
    """The config of `values`, sections with their keys, changed by each `section.key=value`, and validated.

    `values` themselves are changed too. Raises ConfigError with every mistake found, one sentence a line, each naming
    `where` the values are from.
    """
    mistakes: list[str] = []
    overridden: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            mistakes.append(f"--set: found {show(override)}; expected section.key=value")
        elif key not in _LEAVES and key.rpartition(".")[0] not in _MAPPINGS:
            mistakes.append(f"--set: {_not_a_leaf(key)}")
        else:
            try:
                _put(values, key, parse_scalar(text))
            except ValueError as error:
                mistakes.append(f"--set: {key} is {show(text)}; expected one YAML scalar ({error})")
            overridden.add(key)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        mistakes.extend(sentences(error, file=where, overridden=overridden))
        raise ConfigError("\n".join(mistakes)) from error
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


def config_hash(config: RunConfig) -> str:
    """SHA-256 of the config's canonical JSON (sorted keys, no blanks), 64 hex digits."""
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def changed_immutably(old: RunConfig, new: RunConfig) -> list[str]:
    """Say, one sentence a key, what differs from a run's `old` config in the `new` one but must not on resuming it."""
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


def _not_a_leaf(key: str) -> str:
    if key in dotted_fields():
        return f"{key} is a section; expected section.key=value with one of its keys"
    return unknown_key(key)


def _put(values: dict[str, object], key: str, value: object) -> None:
    """Set a dotted key. Where the file has something else than a section, that stays for the validation to report."""
    *sections, name = key.split(".")
    for section in sections:
        below = values.setdefault(section, {})
        if not isinstance(below, dict):
            return
        values = below
    values[name] = value
