"""Prompts from a file of the user: JSONL, JSON, CSV, Parquet, or a folder that `datasets` saved.

.jsonl, .json, .csv ─┐
.parquet ────────────┼─► records, numbered ─► text or messages, tools and answer of each ─► prompts
folder ──────────────┘

A record may have a unique `id`; otherwise the file's name and the record's number identify the prompt.
"""

import codecs
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from configs.prompts import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.answers import EXPECTED, reference_answer
from millrace.prompts.messages import (
    WrittenNumber,
    checked_messages,
    checked_text,
    checked_text_or_number,
    checked_tools,
    last_text,
    parse_unique,
    parsed_messages,
    shown,
)
from millrace.types import Message, Prompt
from storage.json_text import parse_json

_MESSAGES = "messages"
_TOOLS = "tools"
_EXPECTED_FILE = "a .jsonl, .json, .csv or .parquet file"
_EXPECTED_FOLDER = "a folder that `datasets` saved"

_Records = Iterator[tuple[str, int, object]]
"""(`line` or `row`, its number from 1, the record)."""


def read_prompts(source: str, config: PromptsConfig) -> list[Prompt]:
    """The prompts of a file or folder, at a path or fsspec URL, in its order: at least one.

    Raises PromptsError naming the file and the line or row.
    """
    name = PurePosixPath(source).name
    prompts: dict[str, Prompt] = {}
    for unit, number, record in _records(source, config):
        where = f"{source} {unit} {number}"
        if not isinstance(record, dict):
            expected = f"one with the keys {config.prompt_field} and {config.answer_field}"
            raise PromptsError("no object", file=where, expected=expected)
        messages = _messages(record, config, where)
        prompt = Prompt(
            prompt_id=_id(record, f"{name}:{number}", where),
            text=last_text(messages) if messages else checked_text(record, config.prompt_field, where),
            answer=_answer(record, config, where),
            source=name,
            messages=messages,
            tools=checked_tools(record[_TOOLS], where) if record.get(_TOOLS) else (),
        )
        if prompt.prompt_id in prompts:
            raise PromptsError(f'"{prompt.prompt_id}" again', file=where, key="id", expected="each id once")
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise PromptsError("no prompts", file=source, expected="at least one")
    return list(prompts.values())


def _id(record: dict[str, object], default: str, where: str) -> str:
    return checked_text_or_number(record, "id", where) if "id" in record else default


def _messages(record: dict[str, object], config: PromptsConfig, where: str) -> tuple[Message, ...]:
    """The record's conversation; empty if its prompt is text."""
    messages = parsed_messages(record.get(config.prompt_field, record.get(_MESSAGES)), where)
    return checked_messages(messages, where) if isinstance(messages, list) else ()


def _answer(record: dict[str, object], config: PromptsConfig, where: str) -> str:
    text = checked_text_or_number(record, config.answer_field, where)
    answer = reference_answer(text, config.answer_format)
    if answer is None:
        raise PromptsError(shown(text), file=where, key=config.answer_field, expected=EXPECTED[config.answer_format])
    return answer


def _records(source: str, config: PromptsConfig) -> _Records:
    read = _READERS.get(PurePosixPath(source).suffix)
    if read is not None:
        return read(_bytes(source), source, config)
    saved = saved_records(source, lambda names: chosen_columns(names, source, config))
    if saved is None:
        raise PromptsError(
            f'"{source}"',
            key="prompts.source",
            expected="arithmetic, chains, reasoning_gym:TASK, verifiers:ENVIRONMENT, "
            f"{_EXPECTED_FILE}, {_EXPECTED_FOLDER}, or ORG/NAME of a hub",
        )
    return (("row", number, record) for number, record in enumerate(saved, start=1))


def _bytes(source: str) -> bytes:
    try:
        with fsspec.open(source, "rb") as file:
            data: bytes = file.read()
    except (OSError, ValueError, ImportError) as error:
        raise PromptsError(f"can't be read ({error})", file=source, expected=_EXPECTED_FILE) from error
    return data


def _jsonl_records(data: bytes, source: str, config: PromptsConfig) -> _Records:
    """The lines that are not blank."""
    # Windows' editors put one before UTF-8; elsewhere it is a character of the text.
    data = data.removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield "line", number, parse_unique(line.decode("utf-8"), parse_float=WrittenNumber)
        except ValueError as error:
            where, expected = f"{source} line {number}", "one JSON object per line"
            raise PromptsError(_reason(error), file=where, expected=expected) from error


def _json_records(data: bytes, source: str, config: PromptsConfig) -> _Records:
    """The objects of an array. Without one, it is read as JSONL, which is often called .json."""
    text = data.removeprefix(codecs.BOM_UTF8)
    if not text.lstrip().startswith(b"["):
        yield from _jsonl_records(text, source, config)
        return
    try:
        records = parse_unique(text, parse_float=WrittenNumber)
    except ValueError as error:
        expected = "an array of objects, or one object per line"
        raise PromptsError(f"not JSON ({error})", file=source, expected=expected) from error
    for number, record in enumerate(records, start=1):
        yield "row", number, record


def _csv_records(data: bytes, source: str, config: PromptsConfig) -> _Records:
    """The rows under the header, all values text."""
    try:
        text = data.decode("utf-8-sig")
        # Python's own limit, 131,072 characters, is below a long document.
        csv.field_size_limit(sys.maxsize)
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        names = next(rows, [])
        used = chosen_columns(names, source, config)
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) != len(names):
                read = f"{len(row)} values under a header of {len(names)}"
                raise PromptsError(read, file=f"{source} row {number}", expected="as many")
            yield "row", number, {name: value for name, value in zip(names, row, strict=True) if name in used}
    except (UnicodeDecodeError, csv.Error) as error:
        expected = "UTF-8 with a header, commas and double quotes"
        raise PromptsError(f"can't be read as CSV ({_reason(error)})", file=source, expected=expected) from error


def _parquet_records(data: bytes, source: str, config: PromptsConfig) -> _Records:
    """The rows, with the columns that prompts are made of."""
    try:
        names = pq.read_schema(pa.BufferReader(data)).names
        table = pq.read_table(pa.BufferReader(data), columns=chosen_columns(names, source, config))
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise PromptsError(f"can't be read as Parquet ({error})", file=source, expected="a Parquet file") from error
    for number, record in enumerate(rows_of(table), start=1):
        yield "row", number, record


def _reason(error: Exception) -> str:
    """Why a text can't be parsed, without the place that Python's own errors name."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return f"not JSON at column {error.colno} ({error.msg})" if isinstance(error, json.JSONDecodeError) else str(error)


def chosen_columns(names: Sequence[str], source: str, config: PromptsConfig) -> list[str]:
    """Selects the columns of `names` that prompts are made of. Raises PromptsError if any is missing or twice there."""
    prompt = config.prompt_field if config.prompt_field in names or _MESSAGES not in names else _MESSAGES
    used = (prompt, config.answer_field)
    if missing := [name for name in used if name not in names]:
        raise PromptsError("missing", file=source, key=f"column {missing[0]}", expected=f"it among {', '.join(names)}")
    chosen = [name for name in names if name in (*used, "id", _TOOLS)]
    if twice := [name for name in chosen if chosen.count(name) > 1]:
        raise PromptsError("there twice", file=source, key=f"column {twice[0]}", expected="each once")
    return chosen


def saved_records(folder: str, choose: Callable[[list[str]], list[str]]) -> Iterator[dict[str, Any]] | None:
    """The rows of a folder that the library `datasets` saved, with the columns that `choose` returns; None for others.

        folder/state.json ─► data-00000-of-00002.arrow, data-00001-of-00002.arrow ─► rows
        folder/dataset_dict.json: the folder holds one such folder per split

    `folder` is a path or an fsspec URL. Raises PromptsError for a folder of several splits and a damaged file.
    """
    folder = folder.rstrip("/")
    splits = _json(f"{folder}/dataset_dict.json")
    if splits is not None:
        names = _texts(splits.get("splits", []), f"{folder}/dataset_dict.json")
        raise PromptsError(f"holds the splits {', '.join(names)}", file=folder, expected=f"one of them, {folder}/SPLIT")
    state = _json(f"{folder}/state.json")
    # Another program's state.json may be anything.
    files = None if state is None else state.get("_data_files")
    if files is None:
        return None
    listed = files if isinstance(files, list) else [None]
    parts = [file.get("filename") if isinstance(file, dict) else None for file in listed]
    return _rows([f"{folder}/{name}" for name in _texts(parts, f"{folder}/state.json")], choose)


def rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table: class labels as their names, floating-point values as text, None if not finite."""
    labels = _labels(table.schema)
    for index, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            column = table.column(index)
            text = pc.if_else(pc.is_finite(column), column, None).cast(pa.string())
            table = table.set_column(index, field.name, text)
    for row in (row for batch in table.to_batches() for row in batch.to_pylist()):
        for key, names in labels.items():
            number = row[key]
            row[key] = names[number] if number in range(len(names)) else None
        yield row


def _labels(schema: pa.Schema) -> dict[str, list[str]]:
    """The names of the classes in each column of ClassLabel, by column."""
    try:
        features = parse_json(schema.metadata[b"huggingface"])["info"]["features"]
        return {
            name: feature["names"]
            for name, feature in features.items()
            if name in schema.names and isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    # Another program may write anything there.
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _texts(values: object, path: str) -> list[str]:
    """`values`, a list of text in the file `path`. Raises PromptsError for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise PromptsError("no list of files or splits", file=path, expected=_EXPECTED_FOLDER)
    return values


def _json(path: str) -> dict[str, Any] | None:
    try:
        with fsspec.open(path, "rb") as file:
            values = parse_json(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, ImportError) as error:
        raise PromptsError(f"can't be read ({error})", file=path, expected=_EXPECTED_FOLDER) from error
    if not isinstance(values, dict):
        raise PromptsError("no JSON object", file=path, expected=_EXPECTED_FOLDER)
    return values


def _rows(files: list[str], choose: Callable[[list[str]], list[str]]) -> Iterator[dict[str, Any]]:
    for path in files:
        try:
            with fsspec.open(path, "rb") as file, pa.ipc.open_stream(file.read()) as stream:
                table = stream.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise PromptsError(f"can't be read as Arrow ({error})", file=path, expected=_EXPECTED_FOLDER) from error
        yield from rows_of(table.select(choose(table.column_names)))


_READERS: dict[str, Callable[[bytes, str, PromptsConfig], _Records]] = {
    ".jsonl": _jsonl_records,
    ".json": _json_records,
    ".csv": _csv_records,
    ".parquet": _parquet_records,
}
"""By the end of the name."""
SUFFIXES = tuple(_READERS)
