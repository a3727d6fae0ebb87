"""Prompts from a file of the user: JSONL, JSON, CSV, Parquet, or a folder that `datasets` saved.

.jsonl, .json ──────────────────┐
.csv, .parquet, folder ─► table ┴─► records, numbered ─► text or messages, tools and answer of each ─► prompts

A record may have a unique `id`; otherwise the file's name and the record's number identify the prompt.
"""

import codecs
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from configs.errors import near_names
from configs.task import PromptsConfig
from millrace.errors import PromptsError, one_line
from millrace.prompts.answers import EXPECTED, reference_answer
from millrace.prompts.messages import (
    WrittenNumber,
    checked_demonstration,
    checked_messages,
    checked_text,
    checked_text_or_number,
    checked_tools,
    parse_unique,
    parsed_messages,
    shown,
)
from millrace.types import Demonstration, Message, Prompt
from storage.json_text import parse_json

_MESSAGES = "messages"
_TOOLS = "tools"
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_EXPECTED_SOURCE = (
    "arithmetic, chains, reasoning_gym:TASK, verifiers:ENVIRONMENT, a .jsonl, .json, .csv or .parquet file, a folder "
    "that `datasets` saved (of several splits, FOLDER/SPLIT), or ORG/NAME of a hub"
)

_Records = Iterator[tuple[str, int, object]]
"""(`line` or `row`, its number from 1, the record)."""
_Choose = Callable[[Sequence[str]], list[str]]
"""Returns the names of the columns to read, given all names."""


def read_prompts(source: str, config: PromptsConfig, *, learned: bool = False) -> list[Prompt]:
    """The prompts of a file or folder, at a path or fsspec URL, in its order: at least one.

    With `prompts.demonstrations` they have a demonstration; unless they are `learned`, it may be missing. Raises
    PromptsError naming the file and the line or row.
    """
    name = PurePosixPath(source).name
    prompts: dict[str, Prompt] = {}
    for unit, number, record in _records(source, lambda names: _chosen_columns(names, source, config)):
        where = f"{source} {unit} {number}"
        if not isinstance(record, dict):
            expected = f"one with the keys {config.prompt_field} and {config.answer_field}"
            raise PromptsError("no object", file=where, expected=expected)
        try:
            prompt = _prompt(record, config, f"{name}:{number}", where, learned=learned)
        except PromptsError as error:
            if error.key is not None and error.key not in record:
                error.expected = _setting(error.key, config, list(record)) or error.expected
            raise
        if prompt.prompt_id in prompts:
            raise PromptsError(f'"{prompt.prompt_id}" again', file=where, key="id", expected="each id once")
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise PromptsError("no prompts", file=source, expected="at least one")
    return list(prompts.values())


def read_rows(source: str) -> list[dict[str, Any]]:
    """The rows of a file or folder with all their keys, unchecked: at least one. Raises PromptsError."""
    rows = [record for _, _, record in _records(source, list) if isinstance(record, dict)]
    if not rows:
        raise PromptsError("no rows", file=source, expected="at least one")
    return rows


def _prompt(record: dict[str, Any], config: PromptsConfig, place: str, where: str, *, learned: bool) -> Prompt:
    """The prompt in a record; `place`, its file's name and number, identifies it unless it has an id."""
    messages, demonstration = _conversation(record, config, where, learned=learned)
    return Prompt(
        prompt_id=checked_text_or_number(record, "id", where) if "id" in record else place,
        text=str(messages[-1]["content"]) if messages else checked_text(record, config.prompt_field, where),
        answer=_answer(record, config, demonstration, where),
        source=place.rpartition(":")[0],
        messages=messages,
        tools=checked_tools(record[_TOOLS], where) if record.get(_TOOLS) else (),
        demonstration=demonstration,
    )


def _setting(key: str, config: PromptsConfig, names: Sequence[str]) -> str | None:
    """The setting that chooses the column `key`, with the `names` to choose from; None if none does."""
    settings = ("prompt_field", "answer_field", "response_field")
    setting = next((setting for setting in settings if getattr(config, setting) == key), None)
    return (
        None if setting is None else f"prompts.{setting} to name one of {', '.join(name[:40] for name in names[:12])}"
    )


def _conversation(
    record: dict[str, Any], config: PromptsConfig, where: str, *, learned: bool
) -> tuple[tuple[Message, ...], Demonstration | None]:
    """The messages of a record that the policy answers, () for plain text, and its demonstration."""
    conversation = parsed_messages(record.get(config.prompt_field, record.get(_MESSAGES)), where)
    is_list = isinstance(conversation, list)
    has_response = record.get(config.response_field) is not None
    if config.demonstrations and (has_response or (learned and not is_list)):
        response = {"role": "assistant", "content": checked_text(record, config.response_field, where)}
        return checked_messages(conversation, where) if is_list else (), Demonstration(messages=(response,))
    if not isinstance(conversation, list):
        return (), None
    if config.demonstrations and (learned or _ends_with_assistant(conversation)):
        return checked_demonstration(conversation, where)
    return checked_messages(conversation, where), None


def _ends_with_assistant(conversation: list[Any]) -> bool:
    return bool(conversation) and isinstance(conversation[-1], dict) and conversation[-1].get("role") == "assistant"


def _answer(record: dict[str, Any], config: PromptsConfig, shown_turns: Demonstration | None, where: str) -> str:
    """The reference answer of a record; by default that of a demonstration is its last turn."""
    if shown_turns is not None and record.get(config.answer_field) is None:
        return str(shown_turns.messages[-1]["content"])
    written = checked_text_or_number(record, config.answer_field, where)
    answer = reference_answer(written, config.answer_format)
    if answer is None:
        expected = EXPECTED[config.answer_format]
        raise PromptsError(shown(written), file=where, key=config.answer_field, expected=expected)
    return answer


def _records(source: str, choose: _Choose) -> _Records:
    suffix = PurePosixPath(source).suffix
    if suffix in (".jsonl", ".json"):
        # Windows' editors put a mark before UTF-8; elsewhere it is a character of the text.
        data = _bytes(source).removeprefix(codecs.BOM_UTF8)
        is_array = suffix == ".json" and data.lstrip().startswith(b"[")
        return _json_records(data, source) if is_array else _jsonl_records(data, source)
    read = {".csv": _csv_table, ".parquet": _parquet_table}.get(suffix, _saved_table)
    try:
        table = read(source, choose)
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise PromptsError(f"can't be read ({error})", file=source, expected=_EXPECTED_SOURCE) from error
    return (("row", number, record) for number, record in enumerate(_rows_of(table), start=1))


def _bytes(path: str) -> bytes:
    try:
        with fsspec.open(path, "rb") as file:
            data: bytes = file.read()
    except FileNotFoundError as error:
        raise PromptsError("no such file", file=path, expected=near_names(path) or _EXPECTED_SOURCE) from error
    except (OSError, ValueError, ImportError) as error:
        raise PromptsError(f"can't be read ({error})", file=path, expected=_EXPECTED_SOURCE) from error
    return data


def _jsonl_records(data: bytes, source: str) -> _Records:
    """The lines that are not blank."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield "line", number, _parsed(line, f"{source} line {number}", "one JSON object per line")


def _json_records(data: bytes, source: str) -> _Records:
    """The objects of an array."""
    for number, record in enumerate(_parsed(data, source, "an array of objects, or one object per line"), start=1):
        yield "row", number, record


def _parsed(data: bytes, where: str, expected: str) -> Any:
    try:
        return parse_unique(data.decode("utf-8"), parse_float=WrittenNumber)
    except ValueError as error:
        raise PromptsError(f"not JSON in UTF-8 ({error})", file=where, expected=expected) from error


def _csv_table(source: str, choose: _Choose) -> pa.Table:
    """The rows under the header, all values text."""
    data = pa.BufferReader(_bytes(source))
    # One block, so that a value may be of any length.
    options: dict[str, Any] = {
        # Without threads, so that an error names its row.
        "read_options": pa.csv.ReadOptions(block_size=data.size() + 1, use_threads=False),
        "parse_options": pa.csv.ParseOptions(newlines_in_values=True),
    }
    with pa.csv.open_csv(data, **options) as file:
        names = file.schema.names
    data.seek(0)
    as_text = pa.csv.ConvertOptions(include_columns=choose(names), column_types=dict.fromkeys(names, pa.string()))
    return pa.csv.read_csv(data, **options, convert_options=as_text)


def _parquet_table(source: str, choose: _Choose) -> pa.Table:
    file = pq.ParquetFile(pa.BufferReader(_bytes(source)))
    return file.read(columns=choose(file.schema_arrow.names))


def _saved_table(source: str, choose: _Choose) -> pa.Table:
    """The rows of a folder that the library `datasets` saved: Arrow streams, and state.json, their list."""
    folder = source.rstrip("/")
    try:
        with fsspec.open(f"{folder}/state.json", "rb") as file:
            files = [part["filename"] for part in parse_json(file.read())["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError, ImportError) as error:
        read = f'"{source}" ({type(error).__name__}: {one_line(error)})'
        raise PromptsError(read, key="prompts.source", expected=near_names(source) or _EXPECTED_SOURCE) from error
    tables = [pa.ipc.open_stream(_bytes(f"{folder}/{file}")).read_all() for file in files]
    return pa.concat_tables([table.select(choose(table.column_names)) for table in tables])


def _rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table: class labels as their names, floating-point values as text, None if not finite."""
    labels = _labels(table.schema)
    for index, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            column = table.column(index)
            text = pc.if_else(pc.is_finite(column), column, None).cast(pa.string())
            table = table.set_column(index, field.name, text)
    for row in (row for batch in table.to_batches() for row in batch.to_pylist()):
        for key, names in labels.items():
            row[key] = names[row[key]] if row[key] in range(len(names)) else None
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
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}


def _chosen_columns(names: Sequence[str], source: str, config: PromptsConfig) -> list[str]:
    """Selects the columns of `names` that prompts are made of. Raises PromptsError if any is missing or twice there."""
    prompt = config.prompt_field if config.prompt_field in names or _MESSAGES not in names else _MESSAGES
    # Only demonstrations may have no answer.
    used = (prompt,) if config.demonstrations else (prompt, config.answer_field)
    optional = (config.answer_field, config.response_field) if config.demonstrations else ()
    if missing := [name for name in used if name not in names]:
        expected = _setting(missing[0], config, names)
        raise PromptsError("missing", file=source, key=f"column {missing[0]}", expected=expected)
    chosen = [name for name in names if name in (*used, *optional, "id", _TOOLS)]
    if twice := [name for name in chosen if chosen.count(name) > 1]:
        raise PromptsError("there twice", file=source, key=f"column {twice[0]}", expected="each once")
    return chosen
