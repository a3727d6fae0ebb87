"""Prompts: where they come from, which are held out, and in which order they are asked.

arithmetic ─┐                      ┌─► train ─► PromptOrder: group number n ─► prompt
JSONL ──────┼─► prompts ─► split ──┤            (a permutation of train for every epoch, from the seed)
Parquet ────┘                      └─► eval     (never in train, by construction)
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millrace.errors import PromptsError
from millrace.types import Prompt

ARITHMETIC = "arithmetic"
"""The source that needs no file."""

# Part of every stored run's meaning: another salt holds out other prompts.
_SPLIT_SALT = "millrace-held-out:"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The prompts of a run. No text is in both halves; `prompt_id` is unique within each."""

    train: tuple[Prompt, ...]
    """What rollouts are made of, at least one."""
    eval: tuple[Prompt, ...]
    """What progress is measured on, at least one."""


class PromptOrder:
    """Which prompt belongs to which group of the run: `prompts` once per epoch, each epoch in an order of its own."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        """Order `prompts` (at least one) by `seed` (≥ 0), or leave them as they stand when not `shuffle`."""
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: Sequence[int] = ()

    def prompt_at(self, n: int) -> Prompt:
        """The prompt of global group number `n` (≥ 0), the same in every process. O(1) but at an epoch's first use."""
        if n < 0:
            raise ValueError(f"group number is {n}; expected at least 0")
        epoch, position = divmod(n, len(self._prompts))
        if epoch != self._epoch:
            self._order, self._epoch = self._order_of(epoch), epoch
        return self._prompts[self._order[position]]

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order: list[int] = generator.permutation(len(self._prompts)).tolist()
        return order


def load_prompts(
    *,
    source: str,
    eval_source: str | None,
    prompt_field: str,
    answer_field: str,
    digits: int,
    max_sum: int,
    num_eval: int,
) -> PromptSet:
    """Load both halves of a prompt set.

    A source is `arithmetic` (every sum of two numbers of `digits` digits up to `max_sum`) or the path or fsspec URL of
    a `.jsonl` or `.parquet` file that holds text under `prompt_field` and `answer_field`, and under `id` if it likes.
    Without `eval_source`, `num_eval` prompts (≥ 1) of `source` are held out, chosen by hash: the same ones for every
    seed. With it, its prompts are the evaluation, and those of `source` with the same text are left out of training.

    Raises PromptsError naming the file and the line or row.
    """

    def load(name: str) -> list[Prompt]:
        return _arithmetic(digits, max_sum) if name == ARITHMETIC else _read_file(name, prompt_field, answer_field)

    prompts = load(source)
    if eval_source is None:
        train, held_out = _hold_out(prompts, num_eval, _commuted if source == ARITHMETIC else _text)
        if not train:
            raise PromptsError(f"{source}: {len(prompts)} prompts; expected more than the {num_eval} held out of them")
    else:
        held_out = load(eval_source)
        held_out_texts = {prompt.text for prompt in held_out}
        train = [prompt for prompt in prompts if prompt.text not in held_out_texts]
        if not train:
            raise PromptsError(f"{source}: every prompt is in {eval_source} too; expected some to train on")
    return PromptSet(train=tuple(train), eval=tuple(held_out))


def _arithmetic(digits: int, max_sum: int) -> list[Prompt]:
    width, limit = len(str(max_sum)), 10**digits
    return [
        Prompt(
            prompt_id=f"arith-{a:0{digits}d}+{b:0{digits}d}",
            text=f"{a:0{digits}d}+{b:0{digits}d}=",
            answer=f"{a + b:0{width}d}",
            source=ARITHMETIC,
        )
        for a in range(min(limit, max_sum + 1))
        for b in range(min(limit, max_sum - a + 1))
    ]


def _hold_out(
    prompts: Iterable[Prompt], num_eval: int, identity: Callable[[Prompt], str]
) -> tuple[list[Prompt], list[Prompt]]:
    """Split off the `num_eval` prompts first by hash; what shares an identity with one of them is not trained on."""
    prompts = list(prompts)

    def rank(prompt: Prompt) -> bytes:
        return hashlib.sha256((_SPLIT_SALT + identity(prompt)).encode()).digest()

    held_out = sorted(prompts, key=rank)[:num_eval]
    taken = {identity(prompt) for prompt in held_out}
    return [prompt for prompt in prompts if identity(prompt) not in taken], held_out


def _commuted(prompt: Prompt) -> str:
    """One identity for a+b and b+a: who has seen one has seen the other's answer."""
    return "+".join(sorted(prompt.prompt_id.removeprefix("arith-").split("+")))


def _text(prompt: Prompt) -> str:
    return prompt.text


def _read_file(source: str, prompt_field: str, answer_field: str) -> list[Prompt]:
    name, fields = PurePosixPath(source).name, (prompt_field, answer_field)
    suffix = PurePosixPath(source).suffix
    if suffix not in (".jsonl", ".parquet"):
        raise PromptsError(f'prompts source "{source}"; expected "{ARITHMETIC}" or a .jsonl or .parquet file')
    try:
        with fsspec.open(source, "rb") as file:
            data: bytes = file.read()
    except (OSError, ValueError, ImportError) as error:
        raise PromptsError(f"{source}: can't be read ({error}); expected a .jsonl or .parquet file") from error
    records = _jsonl_records(data, source) if suffix == ".jsonl" else _parquet_records(data, source, fields)
    prompts: dict[str, Prompt] = {}
    for place, number, record in records:
        where = f"{source} {place} {number}"
        if not isinstance(record, dict):
            raise PromptsError(f'{where}: no object; expected one with the keys "{prompt_field}" and "{answer_field}"')
        prompt = Prompt(
            prompt_id=_string(record, "id", where) if "id" in record else f"{name}:{number}",
            text=_string(record, prompt_field, where),
            answer=_string(record, answer_field, where),
            source=name,
        )
        if prompt.prompt_id in prompts:
            raise PromptsError(f'{where}: id "{prompt.prompt_id}" was used before; expected each id once')
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise PromptsError(f"{source}: no prompts; expected at least one")
    return list(prompts.values())


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


def _string(record: dict[str, object], key: str, where: str) -> str:
    if key not in record:
        raise PromptsError(f'{where}: key "{key}" is missing; expected text')
    value = record[key]
    if not isinstance(value, str) or not value:
        raise PromptsError(f'{where}: key "{key}" is {_shown(value)}; expected text that is not empty')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise PromptsError(f'{where}: key "{key}" holds half a surrogate pair; expected Unicode text')
    return value


def _shown(value: object) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"
