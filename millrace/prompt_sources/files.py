"""Prompts from a person's own file: JSONL, Parquet, or a folder that `datasets` saved.

.jsonl ───┐
.parquet ─┼─► records, numbered ─► text and answer of each ─► prompts
folder ───┘
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from millrace.errors import PromptsError
from millrace.prompt_sources.answers import EXPECTED, reference_answer
from millrace.prompt_sources.checked_text import checked_text, shown
from millrace.prompt_sources.saved_dataset import saved_records
from millrace.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a record of a file becomes a prompt."""

    prompt_field: str
    """Key or column of the prompt's text."""
    answer_field: str
    """Key or column that holds the answer."""
    answer_format: str
    """Where in it the answer stands: `text`, `gsm8k` or `boxed`."""


def read_prompts(source: str, reading: Reading) -> list[Prompt]:
    """The prompts of a file or folder, at a path or fsspec URL, in its order: at least one.

    Raises PromptsError naming the file and the line or row.
    """
    name = PurePosixPath(source).name
    prompts: dict[str, Prompt] = {}
    for place, number, record in _records(source, (reading.prompt_field, reading.answer_field)):
        where = f"{source} {place} {number}"
        if not isinstance(record, dict):
            keys = f'"{reading.prompt_field}" and "{reading.answer_field}"'
            raise PromptsError(f"{where}: no object; expected one with the keys {keys}")
        prompt = Prompt(
            prompt_id=checked_text(record, "id", where) if "id" in record else f"{name}:{number}",
            text=checked_text(record, reading.prompt_field, where),
            answer=_answer(record, reading, where),
            source=name,
        )
        if prompt.prompt_id in prompts:
            raise PromptsError(f'{where}: id "{prompt.prompt_id}" was used before; expected each id once')
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise PromptsError(f"{source}: no prompts; expected at least one")
    return list(prompts.values())


def _answer(record: dict[str, object], reading: Reading, where: str) -> str:
    text = checked_text(record, reading.answer_field, where)
    answer = reference_answer(text, reading.answer_format)
    if answer is None:
        expected = EXPECTED[reading.answer_format]
        raise PromptsError(f'{where}: key "{reading.answer_field}" is {shown(text)}; expected {expected}')
    return answer


def _records(source: str, fields: tuple[str, ...]) -> Iterator[tuple[str, int, object]]:
    """Each record with the word for its place and its number there, from 1."""
    suffix = PurePosixPath(source).suffix
    if suffix in (".jsonl", ".parquet"):
        data = _bytes(source)
        return _jsonl_records(data, source) if suffix == ".jsonl" else _parquet_records(data, source, fields)
    saved = saved_records(source, fields)
    if saved is None:
        raise PromptsError(
            f'prompts source "{source}"; expected arithmetic, reasoning_gym:TASK, verifiers:ENVIRONMENT, a .jsonl or '
            ".parquet file, or a folder that `datasets` saved"
        )
    return (("row", number, record) for number, record in enumerate(saved, start=1))


def _bytes(source: str) -> bytes:
    try:
        with fsspec.open(source, "rb") as file:
            data: bytes = file.read()
    except (OSError, ValueError, ImportError) as error:
        raise PromptsError(f"{source}: can't be read ({error}); expected a .jsonl or .parquet file") from error
    return data


def _jsonl_records(data: bytes, source: str) -> Iterator[tuple[str, int, object]]:
    """Yield what stands on each line that is not blank, numbered from 1."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield "line", number, json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise PromptsError(
                f"{source} line {number}: byte {error.start} is not UTF-8; expected UTF-8 text"
            ) from error
        except json.JSONDecodeError as error:
            raise PromptsError(
                f"{source} line {number}: not JSON at column {error.colno} ({error.msg}); expected a JSON object a line"
            ) from error


def _parquet_records(data: bytes, source: str, fields: tuple[str, ...]) -> Iterator[tuple[str, int, object]]:
    """Yield each row as a dict of the columns that matter, numbered from 1."""
    try:
        names = pq.read_schema(pa.BufferReader(data)).names
        if missing := [field for field in fields if field not in names]:
            raise PromptsError(f'{source}: column "{missing[0]}" is missing; expected it among {", ".join(names)}')
        table = pq.read_table(pa.BufferReader(data), columns=[name for name in names if name in (*fields, "id")])
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise PromptsError(f"{source}: can't be read as Parquet ({error}); expected a Parquet file") from error
    for number, record in enumerate((row for batch in table.to_batches() for row in batch.to_pylist()), start=1):
        yield "row", number, record
