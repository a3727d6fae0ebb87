"""Loads a `RunConfig` from a YAML file and `--set` overrides, and compares two configs.

YAML without surprises: scalars as in YAML 1.2; keys must be text and unique; no text is lost in a comment.

PyYAML reads YAML 1.1, where `2e-4` is text, `010` is 8, `1:30` is 90 and `no` is false. Here null, true, false and
decimal numbers, `2e-4` among them, are recognised, and every other plain scalar is text. ruamel.yaml's YAML 1.2 would
read `010` as 10 and has octal and binary numbers, so it would need the same rules.
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from pydantic import ValidationError

from configs.errors import ConfigError, UserError, near_names
from configs.schema import RunConfig, dotted_fields, known_fields, schema_key
from configs.section import choices, is_section
from configs.sources import key_in
from configs.stored import put_key
from configs.validation_errors import mistakes, show, unknown_key

PRESETS = Path(__file__).parent / "presets"
_LEAVES = frozenset(key for key, field in dotted_fields().items() if not is_section(field.annotation))
_FIELDS = known_fields()
_MAPPINGS = frozenset(key for key, field in _FIELDS.items() if get_origin(field.annotation) is dict)
"""Keys with names below them that the schema does not list."""
_NESTED = _MAPPINGS | {
    key
    for key, field in _FIELDS.items()
    if list in [get_origin(kind) for kind in (field.annotation, *get_args(field.annotation))]
    or choices(field.annotation)
}
"""Keys whose values may be written as a list or a mapping."""

# How long, where and how fast a run continues. None of these changes the meaning of a committed trajectory or step. The
# number of ranks and the size of microbatches change only the last bits of a gradient; its number format changes more.
# Each step stores which tokens were too old, and which groups had no spread.
_FREE_KEYS = {
    "scoring.workers", "scoring.judge.input_price", "scoring.judge.output_price",
    "staleness.too_old", "training.max_steps", "training.checkpoint_every",
    "training.checkpoint_keep", "training.device", "training.activation_checkpointing", "training.compile",
    "training.optimizer_offload",
    "training.max_tokens_per_microbatch", "training.selection.drop_zero_advantage", "training.on_collapse",
}  # fmt: skip
_FREE_SECTIONS = (
    "scoring.endpoint.", "training.parallel.", "weights.", "storage.", "evaluation.", "promotion.", "budget.",
    "supervision.", "mirror.", "placement.",
)  # fmt: skip
_FREE_ON_RESUME = frozenset(
    key for key in _LEAVES if key in _FREE_KEYS or key.endswith(".threads") or key.startswith(_FREE_SECTIONS)
)

SUPERVISED = (
    "prompts.demonstrations=true", "training.loss=cross_entropy", "generation.group_size=1", "pipeline.mode=sync",
    # What a config for sampled responses may hold and demonstrations do not have.
    "generation.engine=transformers", "generation.engine_args={}", "generation.temperature=1.0",
    "generation.top_p=1.0", "generation.top_k=null", "generation.groups_per_batch=1", "staleness.control=fixed",
    "weights.transport=auto", "placement.colocated=false", "placement.generate.devices=null",
)  # fmt: skip
"""Overrides that make a config one of supervised fine-tuning."""

IMMUTABLE_ON_RESUME = _LEAVES - _FREE_ON_RESUME
"""Settings that define the run cannot change on resume: their dotted keys."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, option: str = "--set") -> RunConfig:
    """Read the YAML file at `path`, apply each `section.key=value` of `overrides` (the last one wins), and validate.

    `option` names in errors where the overrides are from.

    Raises ConfigError with every mistake.

    Examples:
        >>> config = load_config(PRESETS / "tiny-cpu.yaml", ["staleness.max_staleness=4", "training.loss=gspo"])
        >>> config.staleness.max_staleness, config.training.loss.name
        (4, 'gspo')
    """
    file = os.fspath(path)
    return with_overrides(_read_mapping(file), overrides, where=file, option=option)


def with_overrides(
    values: dict[str, object], overrides: Sequence[str], *, where: str, option: str = "--set"
) -> RunConfig:
    """The config of `values`, sections with their keys, changed by each `section.key=value`, and validated.

    `values` themselves are changed too. Raises ConfigError with every mistake, which names `where` the values are from,
    or the `option` that the overrides are from.
    """
    errors: list[UserError] = []
    overridden: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        known = schema_key(key)
        if not equals or not key:
            errors.append(UserError(file=option, read=show(override), expected="section.key=value"))
        elif known in _FIELDS and is_section(_FIELDS[known].annotation):
            expected = "section.key=value with one of its keys"
            errors.append(UserError(file=option, key=key, read="a section", expected=expected))
        elif known not in _FIELDS and not _is_in_mapping(known):
            errors.append(unknown_key(key, option))
        else:
            try:
                put_key(values, key, parse_document(text) if _is_nested(known, text) else parse_scalar(text))
            except ValueError as error:
                errors.append(UserError(file=option, key=key, read=show(text), expected=f"one YAML value ({error})"))
            overridden.add(key)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        errors.extend(mistakes(error, file=where, overridden=overridden, option=option))
        raise ConfigError(errors) from error
    if errors:
        raise ConfigError(errors)
    return config


def changed_immutably(old: RunConfig, new: RunConfig) -> list[str]:
    """One sentence per key that differs between `old` and `new` but must not change when a run is resumed.

    Sources may be added to a mixture, and weights may change.
    """
    differences: dict[str, list[Any]] = {}
    if bool(old.sources) != bool(new.sources):
        # Only the blocks of a mixture say which source each group has.
        differences["sources"] = [list(old.sources), list(new.sources)]
    new_sources = new.by_source()
    for name, source in old.by_source().items():
        if name not in new_sources:
            differences[f"sources.{name}"] = ["a source", None]
            continue
        of_source = _differences(source, new_sources[name], IMMUTABLE_ON_RESUME)
        differences |= {key_in(name, key): pair for key, pair in of_source.items()}
    for name, added in new.sources.items():
        # Scores of a pool begin with the run.
        had = old.sources[name].scoring.replicas if name in old.sources else None
        if added.scoring.replicas != had:
            differences[f"sources.{name}.scoring.replicas"] = [had, added.scoring.replicas]
    if old.compute_dtype == new.compute_dtype:
        # null, and the format that it stands for.
        differences.pop("training.compute_dtype", None)
    return [
        f"{key} was {json.dumps(old_value)} and is {json.dumps(new_value)}; expected a resumed run to keep it"
        for key, (old_value, new_value) in differences.items()
    ]


class Nearest(NamedTuple):
    """A preset, and how a config differs from it."""

    preset: str
    """Name of its file, without `.yaml`."""
    changes: dict[str, list[Any]]
    """Dotted key → [the preset's value, the config's], plain JSON."""


def nearest_preset(config: RunConfig) -> Nearest:
    """The preset with the fewest settings other than the config's; the first by name among equals.

    Of a config of supervised fine-tuning, the settings that make it one are not compared: no preset has them.
    """
    # Every run has its own name and place.
    keys = _LEAVES - {"name", "storage.root"}
    if config.prompts.demonstrations:
        keys -= {setting.partition("=")[0] for setting in SUPERVISED}
    presets = sorted(PRESETS.glob("*.yaml"))
    candidates = [Nearest(file.stem, _differences(load_config(file), config, keys)) for file in presets]
    return min(candidates, key=lambda nearest: len(nearest.changes))


def changed_defaults(config: RunConfig) -> dict[str, list[Any]]:
    """Dotted key of each setting that differs from its default → [the default], plain JSON; [] if it has none."""
    default = RunConfig.model_validate({"training": {"max_steps": config.training.max_steps}})
    changed = {key: [old] for key, (old, _) in _differences(default, config, _LEAVES).items()}
    return {**changed, "training.max_steps": []}


def _differences(old: RunConfig, new: RunConfig, keys: Collection[str]) -> dict[str, list[Any]]:
    old_values, new_values = old.model_dump(mode="json"), new.model_dump(mode="json")
    pairs = {
        key: [reduce(getitem, key.split("."), config) for config in (old_values, new_values)] for key in sorted(keys)
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _read_mapping(file: str) -> dict[str, object]:
    expected = "a YAML file in UTF-8"
    try:
        document = parse_document(Path(file).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        read = f"byte {error.start} is not UTF-8"
    except OSError as error:
        read, expected = f"can't be read ({error.strerror})", near_names(file) or expected
    except ValueError as error:
        read = str(error)
    else:
        if isinstance(document, dict):
            return document
        read, expected = f"the file is {show(document)}", "sections with their keys"
    raise ConfigError([UserError(file=file, read=read, expected=expected)])


def _is_in_mapping(key: str) -> bool:
    parent, _, _ = key.rpartition(".")
    return parent in _MAPPINGS or parent.rpartition(".")[0].endswith(("evaluation.sets", "teachers"))


def _is_nested(key: str, text: str) -> bool:
    """Whether `text` is a list or a mapping, and not a pattern in which brackets are characters."""
    return text[:1] in ("[", "{") and (key in _NESTED or key.rpartition(".")[0] in _MAPPINGS)


# ---- YAML ----

_TAG = "tag:yaml.org,2002:"
_COMMENT = re.compile(r"[ \t]*#")
_HASHES = re.compile(r"[ \t]+##")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 — PyYAML's own class attribute, emptied to start from no rules

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, value in node.value:
            if key.tag != f"{_TAG}str":
                problem = "a key is not text"
            elif key.value in seen:
                problem = f'key "{key.value}" stands twice'
            elif _is_cut_off(value):
                problem = f"{key.value} is cut off by # (quote text that holds #, or write null)"
            else:
                seen.add(key.value)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


def _is_cut_off(value: yaml.Node) -> bool:
    """Whether a comment stands in place of the value, or `##` ends text that has no quotes."""
    if not isinstance(value, yaml.ScalarNode) or value.style is not None:
        return False
    cut = _HASHES if value.tag == f"{_TAG}str" else None if value.value else _COMMENT
    end = value.end_mark
    return cut is not None and cut.match(end.buffer or "", end.pointer) is not None


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"^(?:~|null|)$"), None)
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"^(?:true|false)$"), None)
# 18 digits: no field needs more, and Python refuses to parse numbers of thousands of digits.
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"^[-+]?(?:0|[1-9][0-9]{0,17})$"), None)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"),
    None,
)


def parse_document(text: str) -> object:
    """Parse one YAML document to dicts, lists and scalars; an empty one is None.

    Raises ValueError saying line, column and problem.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from error
    except RecursionError as error:
        raise ValueError("lists or sections are nested too deeply") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        raise ValueError(f"line {line}, column {column}: {error.reason}") from error


def parse_scalar(text: str) -> object:
    """Parse one scalar as a document would, but take everything else, `[`, `#` and `: ` included, as text.

    So regular expressions and URLs need no quotes on a command line. Quotes around text are removed.
    Raises ValueError when a quote is not closed.
    """
    if text[:1] in ("'", '"'):
        return parse_document(text)
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return loader.construct_object(yaml.ScalarNode(tag, text))
