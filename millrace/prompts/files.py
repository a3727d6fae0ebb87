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

import fsspec
import pyarrow as pa
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
from millrace.prompts.saved_dataset import rows_of, saved_records
from millrace.types import Message, Prompt

_MESSAGES = "messages"
_TOOLS = "tools"
_EXPECTED_FILE = "a .jsonl, .json, .csv or .parquet file"

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
            keys = f'"{config.prompt_field}" and "{config.answer_field}"'
            raise PromptsError(f"{where}: no object; expected one with the keys {keys}")
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
            raise PromptsError(f'{where}: id "{prompt.prompt_id}" was used before; expected each id once')
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise PromptsError(f"{source}: no prompts; expected at least one")
    return list(prompts.values())


def place_of(prompt: Prompt, source: str, config: PromptsConfig) -> str | None:
    """Where a prompt stands in the file or folder `source`: "FILE line 3". None if it is not there."""
    name = PurePosixPath(source).name
    if prompt.source != name:
        return None
    for unit, number, record in _records(source, config):
        where = f"{source} {unit} {number}"
        if (
            isinstance(record, dict)
            and _id(record, f"{name}:{number}", where) == prompt.prompt_id
            and _answer(record, config, where) == prompt.answer
        ):
            return where
    return None


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
        expected = EXPECTED[config.answer_format]
        raise PromptsError(f'{where}: key "{config.answer_field}" is {shown(text)}; expected {expected}')
    return answer


def _records(source: str, config: PromptsConfig) -> _Records:
    read = _READERS.get(PurePosixPath(source).suffix)
    if read is not None:
        return read(_bytes(source), source, config)
    saved = saved_records(source, lambda names: chosen_columns(names, source, config))
    if saved is None:
        raise PromptsError(
            f'prompts source "{source}"; expected arithmetic, chains, reasoning_gym:TASK, verifiers:ENVIRONMENT, '
            f"{_EXPECTED_FILE}, a folder that `datasets` saved, or ORG/NAME of a hub"
        )
    return (("row", number, record) for number, record in enumerate(saved, start=1))


def _bytes(source: str) -> bytes:
    try:
        with fsspec.open(source, "rb") as file:
            data: bytes = file.read()
    except (OSError, ValueError, ImportError) as error:
        raise PromptsError(f"{source}: can't be read ({error}); expected {_EXPECTED_FILE}") from error
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
            reason = _reason(error)
            raise PromptsError(f"{source} line {number}: {reason}; expected one JSON object per line") from error


def _json_records(data: bytes, source: str, config: PromptsConfig) -> _Records:
    """The objects of an array. Without one, it is read as JSONL, which is often called .json."""
    text = data.removeprefix(codecs.BOM_UTF8)
    if not text.lstrip().startswith(b"["):
        yield from _jsonl_records(text, source, config)
        return
    try:
        records = parse_unique(text, parse_float=WrittenNumber)
    except ValueError as error:
        raise PromptsError(
            f"{source}: not JSON ({error}); expected an array of objects, or one object per line"
        ) from error
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
        wanted = chosen_columns(names, source, config)
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) != len(names):
                raise PromptsError(
                    f"{source} row {number}: {len(row)} values under a header of {len(names)}; expected as many"
                )
            yield "row", number, {name: value for name, value in zip(names, row, strict=True) if name in wanted}
    except (UnicodeDecodeError, csv.Error) as error:
        reason = _reason(error)
        raise PromptsError(
            f"{source}: can't be read as CSV ({reason}); expected UTF-8 with a header, commas and double quotes"
        ) from error


def _parquet_records(data: bytes, source: str, config: PromptsConfig) -> _Records:
    """The rows, with the columns that prompts are made of."""
    try:
        names = pq.read_schema(pa.BufferReader(data)).names
        table = pq.read_table(pa.BufferReader(data), columns=chosen_columns(names, source, config))
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise PromptsError(f"{source}: can't be read as Parquet ({error}); expected a Parquet file") from error
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
    wanted = (prompt, config.answer_field)
    if missing := [name for name in wanted if name not in names]:
        raise PromptsError(f'{source}: column "{missing[0]}" is missing; expected it among {", ".join(names)}')
    chosen = [name for name in names if name in (*wanted, "id", _TOOLS)]
    if twice := [name for name in chosen if chosen.count(name) > 1]:
        raise PromptsError(f'{source}: column "{twice[0]}" stands twice; expected each once')
    return chosen


_READERS: dict[str, Callable[[bytes, str, PromptsConfig], _Records]] = {
    ".jsonl": _jsonl_records,
    ".json": _json_records,
    ".csv": _csv_records,
    ".parquet": _parquet_records,
}
"""By the end of the name."""
SUFFIXES = tuple(_READERS)
