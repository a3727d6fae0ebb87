"""Trajectories: what an engine returned is what a stream holds and what the trainer gets."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

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
        sampling=Sampling(temperature=0.5, top_p=0.75, max_new_tokens=4),
        incarnation=3,
        generator=1,
        epoch=2,
    )


def test_every_table_of_trajectories_is_a_valid_part(make_trajectories: MakeTrajectories) -> None:
    validate(table_of(make_trajectories([4, 5, 6], group_size=3), first_row_id=7), TRAJECTORY)


def test_every_field_of_a_trajectory_is_in_its_row(make_trajectories: MakeTrajectories) -> None:
    trajectories = make_trajectories([4, 5], group_size=2, policy_version=9)
    rows = table_of(trajectories, first_row_id=7).to_pylist()
    for number, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        response = trajectory.response
        assert row.pop("rollout_logprobs") == pytest.approx(list(response.rollout_logprobs), rel=1e-6)
        assert row == {
            "row_id": 7 + number,
            "group_id": trajectory.request.group_id,
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
            "meta": prompt_meta(trajectory.prompt),
            "message_roles": [],
            "message_starts": [],
            "kept_tokens": [],
            "kept_counts": [],
            "routed_experts": [],
        }


def test_messages_are_counted_from_the_first_token_of_the_prompt(make_trajectories: MakeTrajectories) -> None:
    (whole,) = make_trajectories([6], group_size=1)
    request = dataclasses.replace(
        whole.request, prompt_tokens=(1, 2, 3, 4), message_starts=(("user", 0), ("assistant", 3))
    )
    response = dataclasses.replace(whole.response, message_starts=(("tool", 1), ("assistant", 2)))
    table = table_of([dataclasses.replace(whole, request=request, response=response)])
    (row,) = validate(table, TRAJECTORY).to_pylist()
    assert row["message_roles"] == ["user", "assistant", "tool", "assistant"]
    assert row["message_starts"] == [0, 3, 5, 6]


def test_experts_of_each_token_but_the_last_stand_in_a_flat_list(make_trajectories: MakeTrajectories) -> None:
    whole, other = make_trajectories([6], group_size=2)
    num_computed = len(whole.request.prompt_tokens) + len(whole.response.tokens) - 1
    experts = np.arange(num_computed * 4, dtype="<u2") * 300
    response = dataclasses.replace(whole.response, routed_experts=experts.tobytes())
    table = table_of([dataclasses.replace(whole, response=response), other])
    first, second = validate(table, TRAJECTORY)["routed_experts"].to_pylist()
    assert first == experts.tolist()
    assert second == []


def test_a_response_of_several_versions_is_as_old_as_the_oldest_and_as_new_as_the_newest(
    make_trajectories: MakeTrajectories,
) -> None:
    (whole,) = make_trajectories([1], group_size=1)
    response = Response(
        tokens=(3, 4, 5), rollout_logprobs=(-1.0,) * 3, version_spans=((2, 0), (4, 1), (5, 2)), finish_reason="length"
    )
    table = table_of([dataclasses.replace(whole, response=response)])
    validate(table, TRAJECTORY)
    (row,) = table.to_pylist()
    assert (row["min_policy_version"], row["max_policy_version"]) == (2, 5)
    assert (row["span_versions"], row["span_starts"]) == ([2, 4, 5], [0, 1, 2])


def test_what_an_environment_wrote_carries_no_loss_and_is_not_what_is_judged(
    make_trajectories: MakeTrajectories,
) -> None:
    (whole,) = make_trajectories([1], group_size=1)
    response = Response(
        tokens=(3, 4, 5, 6, 7, 8),
        rollout_logprobs=(-1.0, 0.0, 0.0, -2.0, 0.0, -3.0),
        version_spans=((2, 0), (4, 3)),
        finish_reason="stop",
        environment_spans=((1, 3), (4, 5)),
    )
    assert response.answer_tokens == (8,)
    table = table_of([dataclasses.replace(whole, response=response)])
    validate(table, TRAJECTORY)
    (row,) = table.to_pylist()
    assert row["loss_mask"] == [1, 0, 0, 1, 0, 1]
    assert row["rollout_logprobs"] == [-1.0, 0.0, 0.0, -2.0, 0.0, -3.0]
    assert environment_error_of(row["meta"]) is None
    assert [tokens.tolist() for tokens in answers(table)] == [[8]]
    assert [tokens.tolist() for tokens in before_answers(table, 100)] == [[*whole.request.prompt_tokens, 3, 4, 5, 6, 7]]
    assert [tokens.tolist() for tokens in before_answers(table, 2)] == [[6, 7]]


def test_a_response_that_ends_in_what_an_environment_wrote_gives_no_answer(make_trajectories: MakeTrajectories) -> None:
    (whole,) = make_trajectories([1], group_size=1)
    response = Response(
        tokens=(3, 4), rollout_logprobs=(-1.0, 0.0), version_spans=((2, 0),), finish_reason="length",
        environment_spans=((1, 2),),
    )  # fmt: skip
    assert response.answer_tokens == ()
    assert [tokens.tolist() for tokens in answers(table_of([dataclasses.replace(whole, response=response)]))] == [[]]


def test_without_an_environment_all_of_a_response_is_judged(make_trajectories: MakeTrajectories) -> None:
    trajectories = make_trajectories([4, 5, 6], group_size=3)
    found = [tuple(tokens.tolist()) for tokens in answers(table_of(trajectories))]
    assert found == [trajectory.response.answer_tokens for trajectory in trajectories]
    assert found == [trajectory.response.tokens for trajectory in trajectories]


def test_why_an_environment_failed_stands_beside_the_prompt(make_trajectories: MakeTrajectories) -> None:
    (whole,) = make_trajectories([1], group_size=1)
    failed = dataclasses.replace(whole.response, environment_error="ValueError: 'half a \\ud800'")
    (row,) = table_of([dataclasses.replace(whole, response=failed)]).to_pylist()
    assert environment_error_of(row["meta"]) == failed.environment_error
    assert prompt_of(whole.prompt.prompt_id, row["meta"]) == whole.prompt


def test_trajectories_come_back_from_a_stream_token_by_token(
    memory_store: MemoryStore, make_trajectories: MakeTrajectories
) -> None:
    trajectories = make_trajectories([4, 5, 6], group_size=3)
    StreamWriter(memory_store, layout.trajectories(0), TRAJECTORY, "w").write(table_of(trajectories), tokens=0)
    part = StreamReader(memory_store, layout.trajectories(0), TRAJECTORY).next()
    assert part is not None
    columns = {name: list_slices(part.table[name]) for name in ("prompt_tokens", "response_tokens", "rollout_logprobs")}
    for row, trajectory in enumerate(trajectories):
        assert columns["prompt_tokens"][row].tolist() == list(trajectory.request.prompt_tokens)
        assert columns["response_tokens"][row].tolist() == list(trajectory.response.tokens)
        np.testing.assert_array_equal(
            columns["rollout_logprobs"][row], np.array(trajectory.response.rollout_logprobs, np.float32), strict=True
        )


@pytest.mark.parametrize(("start", "length"), [(0, 9), (0, 4), (3, 4), (8, 1), (9, 0)])
def test_the_slices_of_a_sliced_table_are_those_of_its_rows(
    make_trajectories: MakeTrajectories, start: int, length: int
) -> None:
    table = table_of(make_trajectories([4, 5, 6], group_size=3))
    column = table.slice(start, length)["response_tokens"]
    assert [row.tolist() for row in list_slices(column)] == column.to_pylist()


def test_the_slices_of_a_table_in_several_chunks_are_those_of_its_rows(make_trajectories: MakeTrajectories) -> None:
    table = pa.concat_tables([table_of(make_trajectories([1, 2])).slice(1, 2), table_of(make_trajectories([3]), 4)])
    assert table["response_tokens"].num_chunks == 2
    slices = list_slices(table["response_tokens"])
    assert [row.tolist() for row in slices] == table["response_tokens"].to_pylist()


def test_slices_are_views_and_not_copies(make_trajectories: MakeTrajectories) -> None:
    column = table_of(make_trajectories([4, 5]))["rollout_logprobs"]
    values = column.chunk(0).values.to_numpy()
    assert all(np.shares_memory(row, values) for row in list_slices(column))


def test_a_prompt_comes_back_from_its_rows_meta() -> None:
    prompt = Prompt(prompt_id="p", text='say "é"\n', answer="é", source="sums.jsonl")
    assert prompt_of("p", prompt_meta(prompt)) == prompt
