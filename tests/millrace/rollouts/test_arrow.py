"""Trajectories as rows: an engine's response is stored and read back unchanged."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from configs.stored import DEFAULT_SOURCE
from millrace.rollouts.arrow import (
    answers,
    before_answers,
    environment_error_of,
    list_slices,
    prompt_meta,
    prompt_of,
    trajectory_table,
)
from millrace.types import Prompt, Response, Sampling, Trajectory
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamReader, StreamWriter
from storage.validation import validate

MakeTrajectories = Callable[..., list[Trajectory]]


def table_of(trajectories: list[Trajectory], first_row_id: int = 0) -> pa.Table:
    return trajectory_table(
        trajectories,
        first_row_id=first_row_id,
        sampling={DEFAULT_SOURCE: Sampling(temperature=0.5, top_p=0.75, max_new_tokens=4)},
        incarnation=3,
        generator=1,
        epoch=2,
    )


def test_a_row_has_the_sampling_of_its_source(make_trajectories: MakeTrajectories) -> None:
    sampling = {
        "sums": Sampling(temperature=0.5, top_p=0.75, max_new_tokens=4),
        "words": Sampling(temperature=0.75, top_p=0.5, max_new_tokens=8),
    }
    trajectories = [
        dataclasses.replace(trajectory, request=dataclasses.replace(trajectory.request, source=source))
        for source, trajectory in zip(sampling, make_trajectories([4, 5], group_size=1), strict=True)
    ]
    table = trajectory_table(trajectories, first_row_id=0, sampling=sampling, incarnation=0, generator=0, epoch=0)
    names = ["source", "temperature", "top_p", "max_new_tokens"]
    assert table.select(names).to_pydict() == {
        "source": ["sums", "words"],
        "temperature": [0.5, 0.75],
        "top_p": [0.75, 0.5],
        "max_new_tokens": [4, 8],
    }


def row_of(trajectory: Trajectory, **response: Any) -> dict[str, Any]:
    """The valid row of `trajectory`, whose response has these values."""
    changed = dataclasses.replace(trajectory, response=dataclasses.replace(trajectory.response, **response))
    (row,) = validate(table_of([changed]), TRAJECTORY).to_pylist()
    return row


def test_every_field_of_a_trajectory_is_in_its_row(make_trajectories: MakeTrajectories) -> None:
    trajectories = make_trajectories([4, 5], group_size=2, policy_version=9)
    rows = validate(table_of(trajectories, first_row_id=7), TRAJECTORY).to_pylist()
    for number, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        response = trajectory.response
        assert row.pop("rollout_logprobs") == pytest.approx(list(response.rollout_logprobs), rel=1e-6)
        assert row == {
            "row_id": 7 + number,
            "group_id": trajectory.request.group_id,
            "source": DEFAULT_SOURCE,
            "prompt_id": trajectory.prompt.prompt_id,
            "sample_index": number % 2,
            "prompt_tokens": list(trajectory.request.prompt_tokens),
            "response_tokens": list(response.tokens),
            "span_versions": [9],
            "span_starts": [0],
            "min_policy_version": 9,
            "max_policy_version": 9,
            "incarnation": 3,
            "loss_mask": [1] * len(response.tokens),
            "finish_reason": response.finish_reason,
            "temperature": 0.5,
            "top_p": 0.75,
            "max_new_tokens": 4,
            "generator": 1,
            "epoch": 2,
            "seed": 2**62 + number % 2,
            "t_admitted": 1.25,
            "t_started": 1.5,
            "t_finished": 1.75 + trajectory.request.group_id,
            "t_environment": [],
            "meta": prompt_meta(trajectory.prompt),
            "message_roles": [],
            "message_starts": [],
            "kept_tokens": [],
            "kept_counts": [],
            "routed_experts": [],
        }


def test_message_starts_are_counted_from_the_prompts_first_token(make_trajectories: MakeTrajectories) -> None:
    (whole,) = make_trajectories([6], group_size=1)
    starts = (("user", 0), ("assistant", 3))
    request = dataclasses.replace(whole.request, prompt_tokens=(1, 2, 3, 4), message_starts=starts)
    row = row_of(dataclasses.replace(whole, request=request), message_starts=(("tool", 1), ("assistant", 2)))
    assert row["message_roles"] == ["user", "assistant", "tool", "assistant"]
    assert row["message_starts"] == [0, 3, 5, 6]


def test_routed_experts_are_stored_as_a_flat_list(make_trajectories: MakeTrajectories) -> None:
    (whole,) = make_trajectories([6], group_size=1)
    num_computed = len(whole.request.prompt_tokens) + len(whole.response.tokens) - 1
    experts = np.arange(num_computed * 4, dtype="<u2") * 300
    assert row_of(whole, routed_experts=experts.tobytes())["routed_experts"] == experts.tolist()


def test_a_row_has_the_oldest_and_newest_version_of_its_response(make_trajectories: MakeTrajectories) -> None:
    (whole,) = make_trajectories([1], group_size=1)
    row = row_of(whole, tokens=(3, 4, 5), rollout_logprobs=(-1.0,) * 3, version_spans=((2, 0), (4, 1), (5, 2)))
    assert (row["min_policy_version"], row["max_policy_version"]) == (2, 5)
    assert (row["span_versions"], row["span_starts"]) == ([2, 4, 5], [0, 1, 2])


def test_an_environments_tokens_are_masked_and_not_part_of_the_answer(make_trajectories: MakeTrajectories) -> None:
    (whole,) = make_trajectories([1], group_size=1)
    response = Response(
        tokens=(3, 4, 5, 6, 7, 8),
        rollout_logprobs=(-1.0, 0.0, 0.0, -2.0, 0.0, -3.0),
        version_spans=((2, 0), (4, 3)),
        finish_reason="stop",
        environment_spans=((1, 3), (4, 5)),
    )
    assert response.answer_tokens == (8,)
    table = validate(table_of([dataclasses.replace(whole, response=response)]), TRAJECTORY)
    (row,) = table.to_pylist()
    assert row["loss_mask"] == [1, 0, 0, 1, 0, 1]
    assert row["rollout_logprobs"] == [-1.0, 0.0, 0.0, -2.0, 0.0, -3.0]
    assert environment_error_of(row["meta"]) is None
    assert [tokens.tolist() for tokens in answers(table)] == [[8]]
    assert [tokens.tolist() for tokens in before_answers(table, 100)] == [[*whole.request.prompt_tokens, 3, 4, 5, 6, 7]]
    assert [tokens.tolist() for tokens in before_answers(table, 2)] == [[6, 7]]


def test_a_response_that_ends_with_an_environments_tokens_has_no_answer(make_trajectories: MakeTrajectories) -> None:
    (whole,) = make_trajectories([1], group_size=1)
    response = dataclasses.replace(
        whole.response, tokens=(3, 4), rollout_logprobs=(-1.0, 0.0), environment_spans=((1, 2),)
    )
    assert response.answer_tokens == ()
    assert [tokens.tolist() for tokens in answers(table_of([dataclasses.replace(whole, response=response)]))] == [[]]


def test_without_an_environment_the_whole_response_is_the_answer(make_trajectories: MakeTrajectories) -> None:
    trajectories = make_trajectories([4, 5, 6], group_size=3)
    tokens = [tuple(answer.tolist()) for answer in answers(table_of(trajectories))]
    assert tokens == [trajectory.response.tokens for trajectory in trajectories]
    assert tokens == [trajectory.response.answer_tokens for trajectory in trajectories]


def test_an_environments_error_and_the_prompt_are_read_from_the_rows_meta(make_trajectories: MakeTrajectories) -> None:
    (whole,) = make_trajectories([1], group_size=1)
    prompt = Prompt(prompt_id="p", text='say "é"\n', answer="é", source="sums.jsonl")
    error = "ValueError: 'half a \\ud800'"
    request = dataclasses.replace(whole.request, prompt=prompt)
    meta = row_of(dataclasses.replace(whole, request=request), environment_error=error)["meta"]
    assert environment_error_of(meta) == error
    assert prompt_of("p", meta) == prompt_of("p", prompt_meta(prompt)) == prompt


def test_trajectories_are_read_back_from_a_stream(
    memory_store: MemoryStore, make_trajectories: MakeTrajectories
) -> None:
    table = table_of(make_trajectories([4, 5, 6], group_size=3))
    StreamWriter(memory_store, layout.trajectories(0), TRAJECTORY, "w").write(table, tokens=0)
    part = StreamReader(memory_store, layout.trajectories(0), TRAJECTORY).next()
    assert part is not None
    assert part.table.equals(table)


def test_list_slices_are_the_rows_of_a_sliced_or_chunked_column(make_trajectories: MakeTrajectories) -> None:
    whole = table_of(make_trajectories([4, 5, 6], group_size=3))
    slices = [whole.slice(start, length) for start, length in ((0, 9), (0, 4), (3, 4), (8, 1), (9, 0))]
    chunked = pa.concat_tables([table_of(make_trajectories([1, 2])).slice(1, 2), table_of(make_trajectories([3]), 4)])
    assert chunked["response_tokens"].num_chunks == 2
    for table in (*slices, chunked):
        column = table["response_tokens"]
        assert [row.tolist() for row in list_slices(column)] == column.to_pylist()


def test_list_slices_are_views(make_trajectories: MakeTrajectories) -> None:
    column = table_of(make_trajectories([4, 5]))["rollout_logprobs"]
    values = column.chunk(0).values.to_numpy()
    assert all(np.shares_memory(row, values) for row in list_slices(column))
