"""Trajectories as a long run makes them: 1,024 response tokens each, in whole groups, built column by column."""

import json

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.stored import DEFAULT_SOURCE
from storage.schema import TRAJECTORY, in_order

RESPONSE_TOKENS = 1024
PROMPT_TOKENS = 256
GROUP_SIZE = 8
VOCAB_SIZE = 128_000
POLICY_VERSION = 7

EMPTY = ("t_environment", "message_roles", "message_starts", "kept_tokens", "kept_counts", "routed_experts")
"""Lists that these responses do not have."""


def make_rows(num_rows: int, *, seed: int = 0) -> pa.Table:
    """`num_rows` rows of `TRAJECTORY`, from row_id 0 on, about 11 kB each. Raises ValueError for part of a group."""
    if num_rows <= 0 or num_rows % GROUP_SIZE:
        raise ValueError(f"{num_rows} rows are not whole groups: expected a multiple of {GROUP_SIZE}")
    random = np.random.default_rng(seed)
    ids = np.arange(num_rows)
    responses = (num_rows, RESPONSE_TOKENS)
    started = 1.75e9 + np.sort(random.random(num_rows)) * 60
    values = {
        "row_id": ids,
        "group_id": ids // GROUP_SIZE,
        "source": [DEFAULT_SOURCE] * num_rows,
        "prompt_id": [f"prompt-{i // GROUP_SIZE:06d}" for i in ids],
        "sample_index": ids % GROUP_SIZE,
        "prompt_tokens": _lists(random.integers(0, VOCAB_SIZE, (num_rows, PROMPT_TOKENS), dtype=np.int32)),
        "response_tokens": _lists(random.integers(0, VOCAB_SIZE, responses, dtype=np.int32)),
        "rollout_logprobs": _lists(-random.standard_exponential(responses, dtype=np.float32)),
        "span_versions": _lists(np.full((num_rows, 1), POLICY_VERSION, np.int64)),
        "span_starts": _lists(np.zeros((num_rows, 1), np.int32)),
        "min_policy_version": np.full(num_rows, POLICY_VERSION),
        "max_policy_version": np.full(num_rows, POLICY_VERSION),
        "incarnation": np.zeros(num_rows, np.int32),
        "loss_mask": _lists(np.ones(responses, np.uint8)),
        "finish_reason": ["length" if i % 3 else "stop" for i in ids],
        "temperature": np.ones(num_rows),
        "top_p": np.ones(num_rows),
        "max_new_tokens": np.full(num_rows, RESPONSE_TOKENS),
        "generator": np.zeros(num_rows, np.int32),
        "epoch": np.zeros(num_rows, np.int32),
        "seed": random.integers(0, 2**62, num_rows),
        "t_admitted": started - 0.5,
        "t_started": started,
        "t_finished": started + 20.0,
        "meta": [json.dumps({"prompt": "p" * 700, "answer": str(i), "source": "benchmark"}) for i in ids],
        **{name: [[]] * num_rows for name in EMPTY},
    }
    columns = {name: _column(column, TRAJECTORY.field(name).type) for name, column in values.items()}
    return in_order(pa.table(columns), TRAJECTORY)


def rows_in(megabytes: float) -> int:
    """How many rows make about `megabytes` (of 10⁶ bytes) of Arrow: whole groups, one at least."""
    bytes_a_group: int = make_rows(GROUP_SIZE).nbytes
    return max(1, round(megabytes * 1e6 / bytes_a_group)) * GROUP_SIZE


def renumber(table: pa.Table, first_row_id: int) -> pa.Table:
    """The same rows as they would follow `first_row_id` rows, a multiple of the group size; copies no tokens."""
    ids = np.arange(first_row_id, first_row_id + table.num_rows)
    for name, values in (("row_id", ids), ("group_id", ids // GROUP_SIZE)):
        index = table.column_names.index(name)
        table = table.set_column(index, TRAJECTORY.field(name), pa.array(values, pa.int64()))
    return table


def _lists(values: npt.NDArray[np.generic]) -> pa.ListArray:
    num_rows, length = values.shape
    offsets = np.arange(num_rows + 1, dtype=np.int32) * length
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))


def _column(values: object, dtype: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, dtype)
