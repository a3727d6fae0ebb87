"""Rows of streams: all that one holds, and valid trajectories and scores whose values all differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from storage.schema import SCORE, TEACHER, TRAJECTORY, in_order
from storage.stores.base import Store
from storage.streams.log import LogReader
from storage.streams.stream import StreamReader

_EMPTY = ("t_environment", "message_roles", "message_starts", "kept_tokens", "kept_counts", "routed_experts")
"""Lists that these responses do not have."""


def read_rows(store: Store, path: str, schema: pa.Schema) -> list[dict[str, Any]]:
    """Every row of a stream, by nothing but its reader."""
    return [row for part in iter(StreamReader(store, path, schema).next, None) for row in part.table.to_pylist()]


def part_files(store: Store, path: str) -> list[str]:
    """The files of a stream's parts, in its order."""
    return [f"{path}/{record.file}" for record in iter(LogReader(store, path).next, None) if record.kind == "data"]


def trajectories(first_row_id: int = 0, rows: int = 4) -> pa.Table:
    """Trajectories of generator 1, in groups of four."""
    random = np.random.default_rng(first_row_id)
    ids = np.arange(first_row_id, first_row_id + rows)
    lengths = random.integers(1, 9, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    def per_token(values: np.ndarray, dtype: pa.DataType) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values, dtype))

    tokens = int(offsets[-1])
    values = {
        "row_id": ids,
        "group_id": ids // 4 + 100,
        "source": ["default" for _ in ids],
        "prompt_id": [f"prompt-{i // 4}" for i in ids],
        "sample_index": ids % 4,
        "prompt_tokens": [random.integers(0, 50, 3).tolist() for _ in ids],
        "response_tokens": per_token(random.integers(0, 50, tokens), pa.int32()),
        "rollout_logprobs": per_token(-random.exponential(size=tokens), pa.float32()),
        "span_versions": [[int(i), int(i) + 1] for i in ids],
        "span_starts": [[0, 1] for _ in ids],
        "min_policy_version": ids,
        "max_policy_version": ids + 1,
        "incarnation": np.full(rows, 3),
        "loss_mask": per_token(random.integers(0, 2, tokens), pa.uint8()),
        "finish_reason": ["stop" if i % 2 else "length" for i in ids],
        "temperature": random.random(rows),
        "top_p": random.random(rows),
        "max_new_tokens": np.full(rows, 8),
        "generator": np.full(rows, 1),
        "epoch": np.full(rows, 2),
        "seed": random.integers(0, 2**62, rows),
        "t_admitted": ids + 0.25,
        "t_started": ids + 0.5,
        "t_finished": ids + 0.75,
        "meta": [f'{{"answer": "{i}"}}' for i in ids],
        **{name: [[] for _ in ids] for name in _EMPTY},
    }
    return _table(values, TRAJECTORY)


def trajectories_of(
    sources: Sequence[str], responses: Sequence[Sequence[int]], answer: str, first_row_id: int = 0
) -> pa.Table:
    """Trajectories from these sources, with the tokens of their responses and the answer to their prompts."""
    meta = json.dumps({"prompt": "?", "answer": answer, "source": "test"})
    rows = trajectories(first_row_id, len(sources)).to_pylist()
    for row, source, tokens in zip(rows, sources, responses, strict=True):
        row |= {"source": source, "prompt_tokens": [1], "response_tokens": tokens, "finish_reason": "length"}
        row |= {"loss_mask": [1] * len(tokens), "rollout_logprobs": [-0.5] * len(tokens), "meta": meta}
        version = row["max_policy_version"]
        row |= {"span_versions": [version], "span_starts": [0], "min_policy_version": version}
    return pa.Table.from_pylist(rows, schema=TRAJECTORY)


def scores(first_row_id: int = 0, rows: int = 4) -> pa.Table:
    """Scores, every third of them a timeout."""
    ids = range(first_row_id, first_row_id + rows)
    values = {
        "row_id": ids,
        "reward": [None if i % 3 == 2 else i / 8 for i in ids],
        "components": ['{"exact_match": 1.0}' for _ in ids],
        "status": ["timeout" if i % 3 == 2 else "ok" for i in ids],
        "error": ["took longer than 1 s" if i % 3 == 2 else None for i in ids],
        "verifier_version": ["exact_match-1" for _ in ids],
        "seconds": [0.125 for _ in ids],
        "t_scored": [i + 1.0 for i in ids],
        "exchange": [None for _ in ids],
    }
    return _table(values, SCORE)


def teacher_rows(first_row_id: int, logprobs: Sequence[Sequence[float] | None]) -> pa.Table:
    """A teacher's rows with these log-probabilities by token; None: the trajectory is another teacher's."""
    values = {
        "row_id": range(first_row_id, first_row_id + len(logprobs)),
        "teacher_logprobs": [values or [] for values in logprobs],
        "teacher_top_tokens": [[] for _ in logprobs],
        "teacher_top_logprobs": [[] for _ in logprobs],
        "status": ["elsewhere" if values is None else "ok" for values in logprobs],
        "error": [None for _ in logprobs],
        "teacher_version": ["1" for _ in logprobs],
        "seconds": [0.25 for _ in logprobs],
    }
    return _table(values, TEACHER)


def _table(values: Mapping[str, object], schema: pa.Schema) -> pa.Table:
    columns = {
        name: column if isinstance(column, pa.Array) else pa.array(column, schema.field(name).type)
        for name, column in values.items()
    }
    return in_order(pa.table(columns), schema)
