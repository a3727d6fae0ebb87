"""The answers of an evaluation: `answers/<policy version>.parquet`, one row per prompt, columns `schema.ANSWERS`.

    answers ─► answers/<version>.parquet ─► its length and checksum, in evaluations/<version>.json

The result is written last, so every result has its answers, and a file that was damaged or replaced is noticed. Long
texts are cut in the middle, to 8,000 characters, or fewer where a file would hold more than 32 million.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.evaluation.measures import Answered
from millrace.types import Prompt
from storage import layout
from storage.errors import StreamCorrupt
from storage.json_text import parse_as
from storage.schema import ANSWERS
from storage.stores.base import Store
from storage.streams.files import FileRef, get_file, put_file

_MAX_CHARACTERS, _MAX_CHARACTERS_OF_FILE = 8_000, 32_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredPrompt:
    """A prompt of an evaluation set with its answers."""

    prompt: Prompt
    answers: Sequence[Answered]
    """The greedy one, then the sampled ones."""


def answers_table(answered: Mapping[str, Sequence[AnsweredPrompt]]) -> pa.Table:
    """The answers by name of the evaluation set as a table, with its long texts cut."""
    rows = [(name, row.prompt, row.answers) for name, prompts in answered.items() for row in prompts]
    num_texts = sum(2 + len(answers) for *_, answers in rows)
    most = min(_MAX_CHARACTERS, _MAX_CHARACTERS_OF_FILE // max(1, num_texts))
    values = [
        {
            "set": name,
            "prompt_id": prompt.prompt_id,
            "prompt": cut(prompt.text, most),
            "expected": cut(prompt.answer, most),
            "responses": [cut(answer.response, most) for answer in answers],
            "rewards": [answer.reward for answer in answers],
        }
        for name, prompt, answers in rows
    ]
    return pa.Table.from_pylist(values, schema=ANSWERS)


def write_answers(store: Store, policy_version: int, answers: pa.Table) -> dict[str, Any]:
    """Stores the answers of one version, durably. Returns the reference to the file that its result holds.

    Those of an earlier evaluation of the version are replaced; its result, which names them, is deleted.
    """
    store.delete(layout.evaluation(policy_version))
    path = layout.answers(policy_version)
    store.delete(path)
    sink = pa.BufferOutputStream()
    pq.write_table(answers, sink, compression="zstd")
    return asdict(put_file(store, path, memoryview(sink.getvalue())))


def read_answers(store: Store, result: Mapping[str, Any]) -> pa.Table | None:
    """The answers that belong to an evaluation's result; None if they were not stored. Raises StreamCorrupt."""
    if "answers" not in result:
        return None
    version = result["policy_version"]
    ref = parse_as(FileRef, result["answers"], layout.evaluation(version))
    data = get_file(store, ref)
    try:
        table = pq.read_table(pa.BufferReader(pa.py_buffer(data)))
    except (pa.ArrowException, OSError) as error:
        raise StreamCorrupt(ref.path, f"expected a table of answers: {error}") from error
    if not table.schema.equals(ANSWERS) or not _has_responses(table):
        raise StreamCorrupt(ref.path, "expected a table of answers, with a reward for each response")
    return table


def _has_responses(table: pa.Table) -> bool:
    """Whether each row has a greedy response, and as many rewards as responses."""
    counts = pc.list_value_length(table["responses"])
    return counts.equals(pc.list_value_length(table["rewards"])) and bool(pc.all(pc.greater(counts, 0)).as_py())


def cut(text: str, most: int) -> str:
    """Returns `text`, or its beginning and its end, `most` characters together, and how many are left out."""
    if len(text) <= most:
        return text
    end = len(text) - most // 2
    return f"{text[: most - most // 2]} … ({len(text) - most:,} characters) … {text[end:]}"
