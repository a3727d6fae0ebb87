"""Trajectories as Arrow rows: the table that a generator writes to its stream, and how readers take it apart."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.types import Prompt, Sampling, Trajectory
from storage.schema import TRAJECTORY, UNFINISHED

RESPONSE_LISTS = tuple(field.name for field in UNFINISHED if pa.types.is_list(field.type))
"""The list columns that a response is stored in, finished or not."""


def trajectory_table(
    trajectories: Sequence[Trajectory],
    *,
    first_row_id: int,
    sampling: Mapping[str, Sampling],
    incarnation: int,
    generator: int,
    epoch: int,
) -> pa.Table:
    """Rows of `TRAJECTORY`, in the order of the trajectories.

    `sampling` is by source. `incarnation` is that of the trainer whose weights sampled them, `epoch` that of the
    stream's writer.
    """
    num = len(trajectories)
    requests = [trajectory.request for trajectory in trajectories]
    samplings = [sampling[request.source] for request in requests]
    starts = [trajectory.message_starts for trajectory in trajectories]
    return rows_of(
        trajectories,
        TRAJECTORY,
        incarnation=incarnation,
        row_id=range(first_row_id, first_row_id + num),
        source=[request.source for request in requests],
        prompt_id=[trajectory.prompt.prompt_id for trajectory in trajectories],
        prompt_tokens=column_of_lists([request.prompt_tokens for request in requests], np.int32),
        finish_reason=[trajectory.response.finish_reason for trajectory in trajectories],
        temperature=[of_row.temperature for of_row in samplings],
        top_p=[of_row.top_p for of_row in samplings],
        max_new_tokens=[of_row.max_new_tokens for of_row in samplings],
        generator=[generator] * num,
        epoch=[epoch] * num,
        seed=[request.seed for request in requests],
        t_finished=[trajectory.t_finished for trajectory in trajectories],
        t_environment=column_of_lists([trajectory.t_environment for trajectory in trajectories], np.float64),
        meta=[prompt_meta(each.prompt, each.response.environment_error) for each in trajectories],
        message_roles=[[role for role, _ in of_trajectory] for of_trajectory in starts],
        message_starts=column_of_lists([[at for _, at in of_trajectory] for of_trajectory in starts], np.int32),
    )


def rows_of(trajectories: Sequence[Trajectory], schema: pa.Schema, *, incarnation: int, **columns: Any) -> pa.Table:
    """Rows of `TRAJECTORY` or `UNFINISHED`, as given by `schema`; `columns` are those that the two do not share."""
    requests = [trajectory.request for trajectory in trajectories]
    responses = [trajectory.response for trajectory in trajectories]
    versions = [[version for version, _ in response.version_spans] for response in responses]
    starts = [[start for _, start in response.version_spans] for response in responses]
    columns |= {
        "group_id": [request.group_id for request in requests],
        "sample_index": [request.sample_index for request in requests],
        "response_tokens": column_of_lists([response.tokens for response in responses], np.int32),
        "rollout_logprobs": column_of_lists([response.rollout_logprobs for response in responses], np.float32),
        "span_versions": column_of_lists(versions, np.int64),
        "span_starts": column_of_lists(starts, np.int32),
        "min_policy_version": [min(spans) for spans in versions],
        "max_policy_version": [max(spans) for spans in versions],
        "incarnation": [incarnation] * len(responses),
        "loss_mask": column_of_lists([response.loss_mask for response in responses], np.uint8),
        "t_admitted": [request.t_admitted for request in requests],
        "t_started": [trajectory.t_started for trajectory in trajectories],
        "kept_tokens": column_of_lists([response.kept_tokens for response in responses], np.int32),
        "kept_counts": column_of_lists([response.kept_counts for response in responses], np.int32),
        "routed_experts": _column_of_bytes([response.routed_experts for response in responses]),
    }
    arrays = [
        column if isinstance(column := columns[field.name], pa.Array) else pa.array(column, type=field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _column_of_bytes(rows: Sequence[bytes]) -> pa.ListArray:
    """A list column of uint16, from their bytes."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) // 2 for row in rows], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(b"".join(rows), dtype="<u2")))


def prompt_meta(prompt: Prompt, environment_error: str | None = None) -> str:
    """The JSON of the `meta` column: all that a reward needs to score a stored trajectory.

    That is the prompt and, where an environment raised, its error: such a trajectory gets no score. A response that
    was demonstrated is marked.
    """
    meta: dict[str, Any] = {"prompt": prompt.text, "answer": prompt.answer, "source": prompt.source}
    extra = {
        "messages": prompt.messages,
        "tools": prompt.tools,
        "environment_error": environment_error,
        "demonstration": prompt.demonstration is not None,
    }
    return json.dumps({**meta, **{name: value for name, value in extra.items() if value}})


def prompt_of(prompt_id: str, meta: str) -> Prompt:
    """The prompt in a row's `meta`."""
    values = json.loads(meta)
    return Prompt(
        prompt_id=prompt_id,
        text=values["prompt"],
        answer=values["answer"],
        source=values["source"],
        messages=tuple(values.get("messages", ())),
        tools=tuple(values.get("tools", ())),
    )


def environment_error_of(meta: str) -> str | None:
    """The environment's exception in a row's `meta`, in one line; None where it raised none."""
    error: str | None = json.loads(meta).get("environment_error")
    return error


def answers(table: pa.Table) -> list[npt.NDArray[Any]]:
    """The token ids of each row of `TRAJECTORY` that the reward scores, as `Response.answer_tokens`."""
    rows = zip(list_slices(table["response_tokens"]), list_slices(table["loss_mask"]), strict=True)
    return [tokens[1 + max(np.flatnonzero(mask == 0), default=-1) :] for tokens, mask in rows]


def before_answers(table: pa.Table, num_tokens: int) -> list[npt.NDArray[Any]]:
    """The last `num_tokens` token ids before each of `answers`: of the prompt, and of the turns before the last."""
    rows = zip(list_slices(table["prompt_tokens"]), list_slices(table["response_tokens"]), answers(table), strict=True)
    return [
        np.concatenate((prompt[-num_tokens:], response[: len(response) - len(answer)][-num_tokens:]))[-num_tokens:]
        for prompt, response, answer in rows
    ]


def list_slices(column: pa.ChunkedArray) -> list[npt.NDArray[Any]]:
    """The rows of a list column as numpy views of its flat values: no copy, no Python object per value."""
    # A part read from a stream has one chunk, which combining would copy.
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    offsets = array.offsets.to_numpy()
    # Offsets count from the start of the child array, which a sliced table does not shorten.
    values = array.values.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in itertools.pairwise(offsets)]


def column_of_lists(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> pa.ListArray:
    """A list column, from Python numbers."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=dtype, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
