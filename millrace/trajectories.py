"""Trajectories as rows of Arrow: from an engine's responses to a stream, and from a stream to the trainer's samples."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.types import Prompt, Response, Sampling
from storage.schema import TRAJECTORY


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One response of a group, with the prompt it answers."""

    group_id: int
    sample_index: int
    """Place in the group, 0 to group_size − 1."""
    prompt: Prompt
    prompt_tokens: Sequence[int]
    """[P] token ids."""
    response: Response
    seed: int
    """Of this trajectory's random numbers."""
    t_admitted: float
    """When its group was admitted under the staleness bound, unix seconds."""
    t_started: float
    """When the engine got it, unix seconds."""
    t_finished: float
    """When its last token was sampled, unix seconds."""


def trajectory_table(
    rollouts: Sequence[Rollout],
    *,
    first_row_id: int,
    sampling: Sampling,
    incarnation: int,
    generator: int,
    epoch: int,
) -> pa.Table:
    """Rows of `TRAJECTORY` for rollouts, in their order.

    `incarnation` is the trainer's whose weights sampled them, `epoch` the stream writer's.
    """
    num = len(rollouts)
    responses = [rollout.response for rollout in rollouts]
    versions = [[version for version, _ in response.version_spans] for response in responses]
    columns: dict[str, Any] = {
        "row_id": range(first_row_id, first_row_id + num),
        "group_id": [rollout.group_id for rollout in rollouts],
        "prompt_id": [rollout.prompt.prompt_id for rollout in rollouts],
        "sample_index": [rollout.sample_index for rollout in rollouts],
        "prompt_tokens": _lists([rollout.prompt_tokens for rollout in rollouts], np.int32),
        "response_tokens": _lists([response.tokens for response in responses], np.int32),
        "rollout_logprobs": _lists([response.rollout_logprobs for response in responses], np.float32),
        "span_versions": _lists(versions, np.int64),
        "span_starts": _lists([[start for _, start in response.version_spans] for response in responses], np.int32),
        "min_policy_version": [min(spans) for spans in versions],
        "max_policy_version": [max(spans) for spans in versions],
        "incarnation": [incarnation] * num,
        "loss_mask": _lists([response.loss_mask for response in responses], np.uint8),
        "finish_reason": [response.finish_reason for response in responses],
        "temperature": [sampling.temperature] * num,
        "top_p": [sampling.top_p] * num,
        "max_new_tokens": [sampling.max_new_tokens] * num,
        "generator": [generator] * num,
        "epoch": [epoch] * num,
        "seed": [rollout.seed for rollout in rollouts],
        "t_admitted": [rollout.t_admitted for rollout in rollouts],
        "t_started": [rollout.t_started for rollout in rollouts],
        "t_finished": [rollout.t_finished for rollout in rollouts],
        "meta": [prompt_meta(rollout.prompt, rollout.response.environment_error) for rollout in rollouts],
    }
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, type=TRAJECTORY.field(name).type)
        for name, column in columns.items()
    ]
    return pa.Table.from_arrays(arrays, schema=TRAJECTORY)


def prompt_meta(prompt: Prompt, environment_error: str | None = None) -> str:
    """What a verifier needs later, as the JSON of the `meta` column: a stored rollout scores by itself.

    That is the prompt and, where its environment raised, what: such a rollout can't be judged.
    """
    meta = {"prompt": prompt.text, "answer": prompt.answer, "source": prompt.source}
    return json.dumps(meta if environment_error is None else {**meta, "environment_error": environment_error})


def prompt_of(prompt_id: str, meta: str) -> Prompt:
    """The prompt that `prompt_meta` wrote."""
    values = json.loads(meta)
    return Prompt(prompt_id=prompt_id, text=values["prompt"], answer=values["answer"], source=values["source"])


def environment_error_of(meta: str) -> str | None:
    """What the rollout's environment raised, in one line, by the `meta` that `prompt_meta` wrote; None if nothing."""
    error: str | None = json.loads(meta).get("environment_error")
    return error


def answers(table: pa.Table) -> list[npt.NDArray[Any]]:
    """What is judged of each row of `TRAJECTORY`: its token ids behind the last that an environment wrote, if any."""
    rows = zip(list_slices(table["response_tokens"]), list_slices(table["loss_mask"]), strict=True)
    return [tokens[1 + max(np.flatnonzero(mask == 0), default=-1) :] for tokens, mask in rows]


def list_slices(column: pa.ChunkedArray) -> list[npt.NDArray[Any]]:
    """The rows of a list column as numpy views of its flat values: no copy, no Python object a value."""
    # A part read from a stream has one chunk, which combining would copy.
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    offsets = array.offsets.to_numpy()
    # Offsets count from the start of the child array, which a sliced table does not shorten.
    values = array.values.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in itertools.pairwise(offsets)]


def _lists(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = np.fromiter((value for row in rows for value in row), dtype=dtype, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
