"""Writes the pages of docs/reference from the code: `python docs/generate.py`, as `make docs` does."""

import argparse
import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
from pydantic_core import PydanticUndefined

from configs.schema import OF_SOURCE, RunConfig, dotted_fields
from configs.section import choices, is_section
from configs.sources import SECTIONS, SourceConfig
from configs.training import TeacherConfig, TrainingConfig
from dashboard.integrations.prometheus import FAMILIES
from flows.cli.main import build_parser
from millrace.training.losses.factory import LOSSES
from millrace.training.step_report import StepReport
from storage import schema

FOLDER = Path(__file__).parent / "reference"


def commands() -> str:
    """The commands of `millrace` with their options."""
    (parsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {choice.dest: choice.help for choice in parsers._choices_actions}
    parts = ["# Commands", _table(("command", "purpose"), ((f"`millrace {n}`", s) for n, s in summaries.items()))]
    for name, parser in parsers.choices.items():
        rows = [
            (f"`{' '.join(filter(None, (', '.join(option.option_strings), _value(option))))}`", option.help)
            for option in parser._actions
            if not isinstance(option, argparse._HelpAction)
        ]
        parts += [f"## millrace {name}", str(parser.description), _table(("argument", "meaning"), rows)]
    return _page(parts)


def config() -> str:
    """The keys of a run's config with type, default and meaning."""
    parts = [
        "# Config keys",
        "Set them in a YAML file or with `--set KEY=VALUE`. The parameters of each loss are in [losses](losses.md).",
    ]
    sections: dict[str, list[Sequence[str | None]]] = {}
    fields = dotted_fields(RunConfig, with_parameters=True)
    fields |= {f"{OF_SOURCE}{name}": field for name, field in SourceConfig.model_fields.items()}
    fields |= {f"teachers.NAME.{name}": field for name, field in TeacherConfig.model_fields.items()}
    for key, field in fields.items():
        if field.description and not is_section(field.annotation) and not key.startswith("training.loss."):
            default = _default(field.get_default(call_default_factory=True))
            sections.setdefault(key.rpartition(".")[0], []).append((f"`{key}`", default, field.description))
    for section, rows in sections.items():
        parts += [f"## {section or 'The run'}", _table(("key", "default", "meaning"), rows)]
    parts.append(
        "A source also takes these keys of the run's sections, with the same meaning; those left out are the run's: "
        f"{'; '.join(map(_keys_of_source, SECTIONS))}."
    )
    return _page(parts)


def _keys_of_source(section: str) -> str:
    """The keys of one of the run's sections that a source may have, too."""
    own, of_run = (dotted_fields(kind.model_fields[section].annotation) for kind in (SourceConfig, RunConfig))
    return f"all of `{section}`" if own.keys() == of_run.keys() else ", ".join(f"`{section}.{key}`" for key in own)


def columns() -> str:
    """The columns of each stream."""
    parts = ["# Columns", "Of the streams, and of `answers/`. R is the number of response tokens of a row."]
    for name, table in vars(schema).items():
        if isinstance(table, pa.Schema):
            rows = [(f"`{field.name}`", f"{field.type}", field.metadata[b"doc"].decode()) for field in table]
            parts += [f"## {name.lower()}", _table(("column", "type", "meaning"), rows)]
    return _page(parts)


def losses() -> str:
    """The losses with formula, source and parameters."""
    kinds = {
        name: kind
        for kind in choices(TrainingConfig.model_fields["loss"].annotation)
        for name in get_args(kind.model_fields["name"].annotation)
    }
    parts = ["# Losses", "Values of `training.loss`. Symbols are those of [losses and advantages](../losses.md)."]
    for name, function in LOSSES.items():
        fields = {key: field for key, field in kinds[name].model_fields.items() if key != "name"}
        rows = [(f"`training.loss.{key}`", _default(field.default), field.description) for key, field in fields.items()]
        parts += [f"## {name}", str(inspect.getdoc(function))]
        parts += [_table(("parameter", "default", "meaning"), rows)] if rows else []
    return _page(parts)


def metrics() -> str:
    """The measures of an optimizer step, and the series for Prometheus."""
    series = [
        (f"`{name}`", f"`{family.newest_of[1]}`" if family.newest_of else "", family.doc)
        for name, family in FAMILIES.items()
    ]
    return _page(
        [
            "# Metrics",
            "## Of a step",
            str(StepReport.__doc__),
            _table(("metric", "meaning"), ((f"`{name}`", doc) for name, doc in _field_docs(StepReport))),
            "## Prometheus",
            "`/metrics` of the dashboard. A series with a metric shows the newest value of that metric in the run.",
            _table(("series", "metric", "meaning"), series),
        ]
    )


def _field_docs(described: type) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass, each with the docstring after it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(described))).body[0].body  # type: ignore[attr-defined]
    for number, node in enumerate(body):
        if isinstance(node, ast.AnnAssign):
            after = body[number + 1] if number + 1 < len(body) else None
            doc = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield ast.unparse(node.target), str(doc)


def _value(option: argparse.Action) -> str:
    """The placeholder of an option's value."""
    if option.nargs == 0:
        return ""
    if option.choices is not None:
        return "|".join(map(str, option.choices))
    return str(option.metavar or option.dest.upper())


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
        value = value.get("name", value)
    return f"`{json.dumps(value, default=str)}`"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(' '.join(str(cell or '').replace('|', chr(92) + '|').split()) for cell in row)} |"
        for row in lines
    )


def _page(parts: Sequence[str]) -> str:
    return "\n\n".join(parts) + "\n"


PAGES = {function.__name__: function for function in (commands, config, columns, losses, metrics)}
"""The pages by name, each with the function that returns its Markdown."""

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, function in PAGES.items():
        (FOLDER / f"{name}.md").write_text(function())
