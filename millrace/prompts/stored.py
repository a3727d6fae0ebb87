"""Demonstrations from a stored run: its own rollouts that satisfy a condition, such as those with a reward of 1.

║ consumed ║ ─► rows with a reward ─► where ─► ║ trajectories ║: whole responses, each pair of prompt and tokens once

Only reads: the run's writers are not fenced. Tokens are learned as they were sampled, so the model must have the run's
tokenizer. Prompts are written anew, with the template and the system prompt of the run that learns.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.errors import InputError, PromptsError
from millrace.prompts.files import SUFFIXES
from millrace.rollouts.arrow import list_slices, prompt_of
from millrace.rollouts.consumed import read_consumed
from millrace.types import Demonstration, Prompt
from storage import layout
from storage.errors import StoreRefused
from storage.schema import CONSUMED, TRAJECTORY
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.record import Record
from storage.streams.stream import StreamReader, read_part, read_removed

# Those that DuckDB does not list as functions, or lists as functions that do not change.
_CHANGING = re.compile("(table)?sample|age|ago|(current_|local)(local)?time(stamp)?")
_COLUMNS = ["prompt_id", "prompt_tokens", "response_tokens", "loss_mask", "finish_reason", "meta"]
_LISTS = ("prompt_tokens", "response_tokens", "loss_mask")
_WITHOUT_FILES = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "threads": "1",
    "lock_configuration": "true",
}


def is_stored_run(source: str) -> bool:
    """Whether `source` is the folder or URL of a stored run. Raises the store's errors."""
    if source.endswith(SUFFIXES):
        return False
    try:
        return open_store(source).exists(layout.RUN)
    except StoreRefused:
        return False


def stored_demonstrations(url: str, where: str | None) -> list[Prompt]:
    """The prompts of the run at `url`, each with a response whose row of `consumed` has a reward and fulfils `where`.

    In the order of the run; responses that were cut off are left out, because their end can't be learned. Raises
    PromptsError if nothing is left or `where` is not a condition, and StreamCorrupt.
    """
    store = open_store(url)
    rows = read_consumed(store)
    rows = rows.filter(pc.is_valid(rows["reward"]))
    where = where or "reward >= 1"
    try:
        chosen = rows_where(rows, where)
    except InputError as error:
        raise PromptsError(error.read, key="prompts.where", expected=error.expected) from error
    prompts: dict[tuple[bytes, bytes], Prompt] = {}
    for generator in pc.unique(chosen["generator"]).sort().to_pylist():
        row_ids = chosen.filter(pc.equal(chosen["generator"], generator))["trajectory_row_id"].to_numpy()
        for key, prompt in _read(store, generator, np.sort(row_ids)):
            prompts.setdefault(key, prompt)
    if not prompts:
        read = f"none of its {rows.num_rows} rollouts with a reward is whole and fulfils {where!r}"
        raise PromptsError(read, file=url, expected="at least one to learn from")
    return list(prompts.values())


def stored_parts(url: str) -> str:
    """Names the run at `url` and the content of its streams, by the checksums of their parts."""
    store = open_store(url)
    generators = pc.unique(read_consumed(store)["generator"]).sort().to_pylist()
    streams = [(layout.CONSUMED, CONSUMED), *((layout.trajectories(g), TRAJECTORY) for g in generators)]
    digests = []
    for path, schema in streams:
        checksums = [record.checksum for record in _records(store, path, schema)]
        digest = hashlib.sha256(" ".join(checksums).encode()).hexdigest()[:12]
        digests.append(f"{path} {len(checksums)} parts {digest}")
    return ", ".join(digests)


def rows_where(rows: pa.Table, condition: str, longest_ms: int = 60_000) -> pa.Table:
    """The rows that fulfil an SQL condition, which can't read files or other tables: the same in every process.

    Raises InputError, also for a condition that takes longer than `longest_ms`, milliseconds.
    """
    # Imported late: only a condition needs it.
    import duckdb

    try:
        with duckdb.connect(config={"max_execution_time": str(longest_ms), **_WITHOUT_FILES}) as database:
            unstable = database.sql("select function_name from duckdb_functions() where stability <> 'CONSISTENT'")
            names = {name for (name,) in unstable.fetchall()} - {*rows.column_names}
            for word in re.findall(r"'[^']*'|\w+", condition.lower()):
                if word in names or _CHANGING.fullmatch(word):
                    expected = "one that chooses the same rows in every process"
                    raise InputError(f"{condition!r}, which changes with {word}", expected=expected)
            # As an expression it can't end the statement and begin another.
            return database.from_arrow(rows).filter(condition).to_arrow_table()
    except duckdb.Error as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())
        expected = f"an SQL condition over {', '.join(rows.column_names)} that takes at most {longest_ms // 1000} s"
        raise InputError(f"{condition!r}: {reason}", expected=expected) from error


def _read(store: Store, generator: int, row_ids: npt.NDArray[np.int64]) -> Iterator[tuple[tuple[bytes, bytes], Prompt]]:
    """Yields the whole responses of these rows, with their tokens as a key. Raises PromptsError for removed parts."""
    path = layout.trajectories(generator)
    removed = read_removed(store, path)
    for record in _records(store, path, TRAJECTORY):
        first, last = np.searchsorted(row_ids, [record.first_row_id, record.first_row_id + record.rows])
        if first == last:
            continue
        if record.part < removed:
            read = f"millrace gc removed the first {removed} parts of {path}"
            raise PromptsError(read, file=store.url, expected="a condition on rollouts that are still stored")
        table = read_part(store, path, TRAJECTORY, record, _COLUMNS).take(row_ids[first:last] - record.first_row_id)
        table = table.filter(pc.equal(table["finish_reason"], "stop"))
        names, metas = table["prompt_id"].to_pylist(), table["meta"].to_pylist()
        lists = zip(*(list_slices(table[name]) for name in _LISTS), strict=True)
        for name, meta, (prompt_tokens, response, mask) in zip(names, metas, lists, strict=True):
            shown = Demonstration(tokens=tuple(response.tolist()), environment_spans=_spans(mask))
            yield (prompt_tokens.tobytes(), response.tobytes()), replace(prompt_of(name, meta), demonstration=shown)


def _records(store: Store, path: str, schema: pa.Schema) -> Iterator[Record]:
    return iter(StreamReader(store, path, schema).next_record, None)


def _spans(mask: npt.NDArray[Any]) -> tuple[tuple[int, int], ...]:
    """(first, end) of each run of zeros in a mask."""
    changes = np.flatnonzero(np.diff(np.concatenate([[1], mask, [1]]).astype(np.int8))).tolist()
    return tuple(zip(changes[::2], changes[1::2], strict=True))
