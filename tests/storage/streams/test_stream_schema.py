"""Columns are documented, and a table that breaks their rules is refused with its first bad row."""

from collections.abc import Callable
from contextlib import nullcontext

import pyarrow as pa
import pytest
from support.streams.rows import teacher_rows

from storage.schema import SCORE, TEACHER, TRAJECTORY, check_columns
from storage.validation import validate

MakeTable = Callable[..., pa.Table]


def replaced(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    field = table.schema.field(name)
    return table.set_column(table.column_names.index(name), name, pa.array(values, field.type))


def with_value(table: pa.Table, name: str, row: int, value: object) -> pa.Table:
    values = table.column(name).to_pylist()
    values[row] = value
    return replaced(table, name, values)


def test_valid_tables_pass_whole_sliced_chunked_and_empty(make_trajectories: MakeTable, make_scores: MakeTable) -> None:
    for table, schema in ((make_trajectories(5, 9), TRAJECTORY), (make_scores(5, 9), SCORE)):
        validate(table, schema)
        validate(table.slice(3, 4), schema)
        validate(pa.concat_tables([table.slice(0, 4), table.slice(4)]), schema)
        validate(schema.empty_table(), schema)


def test_missing_misordered_and_mistyped_columns_are_refused(make_scores: MakeTable) -> None:
    schema = make_scores().schema
    mistyped = schema.set(6, pa.field("seconds", pa.float64()))
    for wrong in (schema.remove(1), pa.schema(list(schema)[::-1]), mistyped):
        with pytest.raises(ValueError):
            check_columns(wrong, SCORE)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("row_id", 3, "row_id"),
        ("prompt_id", None, "prompt_id is null"),
        ("response_tokens", None, "response_tokens is null"),
        ("response_tokens", [1] * 20, "rollout_logprobs and response_tokens"),
        ("loss_mask", [], "loss_mask and response_tokens"),
        ("prompt_tokens", [1, None], "prompt_tokens holds a null"),
        ("span_starts", [0], "span_starts and span_versions"),
        ("span_starts", [1, 2], "first span"),
        ("span_starts", [0, 0], "span_starts is not ascending"),
        ("span_starts", [0, -1], "span_starts is not ascending"),
        ("span_starts", [0, 99], "span starts after"),
        ("min_policy_version", 1000, "min_policy_version"),
        ("finish_reason", "abort", "finish_reason"),
        ("message_starts", [0], "message_starts and message_roles"),
        ("routed_experts", [1], "routed_experts"),
    ],
)
def test_the_first_bad_trajectory_is_named(make_trajectories: MakeTable, name: str, value: object, reason: str) -> None:
    table = with_value(make_trajectories(), name, 2, value)
    with pytest.raises(ValueError, match=f"^row 2: .*{reason}"):
        validate(table, TRAJECTORY)
    chunked = pa.concat_tables([make_trajectories(0, 9).slice(7), make_trajectories(9, 1)])
    validate(chunked, TRAJECTORY)


@pytest.mark.parametrize("starts", [[1, 0], [-1, 0], [0, 999]])
def test_messages_begin_one_after_the_other(make_trajectories: MakeTable, starts: list[int]) -> None:
    table = with_value(make_trajectories(), "message_roles", 2, ["user", "assistant"])
    validate(with_value(table, "message_starts", 2, [0, 1]), TRAJECTORY)
    with pytest.raises(ValueError, match=r"^row 2: .*message"):
        validate(with_value(table, "message_starts", 2, starts), TRAJECTORY)


def with_kept(table: pa.Table, row: int, kept: list[list[int]]) -> pa.Table:
    table = with_value(table, "kept_tokens", row, [token for ids in kept for token in ids])
    return with_value(table, "kept_counts", row, [len(ids) for ids in kept])


def test_a_response_token_is_among_its_kept_tokens(make_trajectories: MakeTable) -> None:
    table = make_trajectories()
    response = table["response_tokens"].to_pylist()[2]
    assert len(response) > 1
    # Tokens that an environment wrote have no kept tokens.
    kept = [[], *([token, (token + 1) % 50] for token in response[1:])]
    good = with_kept(table, 2, kept)
    validate(good, TRAJECTORY, vocab_size=50)
    validate(good.slice(2), TRAJECTORY, vocab_size=50)
    other = with_kept(
        with_kept(table, 1, []), 2, [[token + 1] if token == response[-1] else [token] for token in response]
    )
    for rows, row in ((other, 2), (other.slice(1), 1)):
        with pytest.raises(ValueError, match=f"^row {row}: .*kept_tokens"):
            validate(rows, TRAJECTORY)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tokens, counts: (tokens, counts[1:]), "kept_counts and response_tokens"),
        (lambda tokens, counts: (tokens, []), "kept_counts do not add up"),
        (lambda tokens, counts: (tokens[1:], counts), "kept_counts do not add up"),
        (lambda tokens, counts: (tokens, [-1, *counts[1:]]), "kept_counts holds a negative"),
        (lambda tokens, counts: ([*tokens, 50], [*counts[:-1], 2]), "kept_tokens holds a token id"),
    ],
)
def test_kept_tokens_that_do_not_fit_their_response_are_named(
    make_trajectories: MakeTable, change: Callable[..., tuple[list[int], list[int]]], reason: str
) -> None:
    table = make_trajectories()
    tokens = table["response_tokens"].to_pylist()[2]
    changed, counts = change(tokens, [1] * len(tokens))
    table = with_value(with_value(table, "kept_tokens", 2, changed), "kept_counts", 2, counts)
    with pytest.raises(ValueError, match=f"^row 2: {reason}"):
        validate(table, TRAJECTORY, vocab_size=50)


def test_a_response_without_tokens_may_have_a_span_or_none(make_trajectories: MakeTable) -> None:
    table = make_trajectories()
    for name in ("response_tokens", "rollout_logprobs", "loss_mask"):
        table = with_value(table, name, 1, [])
    for starts in ([], [0]):
        changed = with_value(table, "span_versions", 1, starts)
        validate(with_value(changed, "span_starts", 1, starts), TRAJECTORY, vocab_size=50, group_size=4)


@pytest.mark.parametrize("name", ["prompt_tokens", "response_tokens"])
@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_id_outside_the_promised_vocabulary_is_named(
    make_trajectories: MakeTable, name: str, token: int
) -> None:
    table = make_trajectories()
    tokens = table.column(name).to_pylist()
    tokens[2][-1] = token
    table = replaced(table, name, tokens)
    validate(table, TRAJECTORY)
    for rows, row in ((table, 2), (table.slice(1), 1), (pa.concat_tables([table.slice(0, 1), table.slice(1)]), 2)):
        with pytest.raises(ValueError, match=f"^row {row}: {name} "):
            validate(rows, TRAJECTORY, vocab_size=50)
    validate(table.slice(3), TRAJECTORY, vocab_size=50)


WHOLE = [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("group_ids", "sample_indices", "bad_row"),
    [
        ([7] * 4 + [8] * 4, WHOLE, None),
        ([8] * 4 + [7] * 4, WHOLE, None),
        ([7] * 3 + [8] * 5, WHOLE, 3),
        ([7] * 8, WHOLE, 4),
        ([7] * 4 + [8] * 4, [0, 1, 3, 2, 0, 1, 2, 3], 2),
        ([7] * 4 + [8] * 4, [0, 1, 2, 3, 1, 2, 3, 4], 4),
        ([7] * 4 + [8] * 2, WHOLE[:6], 4),
        ([7], [0], 0),
    ],
)
def test_groups_are_whole_where_their_size_is_promised(
    make_trajectories: MakeTable, group_ids: list[object], sample_indices: list[object], bad_row: int | None
) -> None:
    table = replaced(make_trajectories(0, len(group_ids)), "group_id", group_ids)
    table = replaced(table, "sample_index", sample_indices)
    validate(table, TRAJECTORY)
    with nullcontext() if bad_row is None else pytest.raises(ValueError, match=f"^row {bad_row}: "):
        validate(table, TRAJECTORY, group_size=4)


def test_invalid_offsets_are_refused(make_trajectories: MakeTable) -> None:
    wrong = pa.ListArray.from_arrays(pa.array([0, 3, 1, 3, 4], pa.int32()), pa.array([1, 2, 3, 4], pa.int32()))
    index = TRAJECTORY.get_field_index("prompt_tokens")
    with pytest.raises(ValueError, match=f"Column {index}: "):
        validate(make_trajectories().set_column(index, "prompt_tokens", wrong), TRAJECTORY)


def test_the_other_rules_hold_where_a_column_is_left_out(make_trajectories: MakeTable) -> None:
    for left_out in TRAJECTORY.names:
        table = make_trajectories().drop_columns(left_out)
        validate(table, table.schema, vocab_size=50, group_size=4)
        if left_out != "row_id":
            with pytest.raises(ValueError, match="row 1: row_id"):
                validate(with_value(table, "row_id", 1, 5), table.schema)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_log_probability_that_is_not_finite_is_named_also_in_a_slice(
    make_trajectories: MakeTable, value: float
) -> None:
    table = make_trajectories()
    logprobs = table.column("rollout_logprobs").to_pylist()
    logprobs[2][-1] = value
    table = replaced(table, "rollout_logprobs", logprobs)
    for rows, row in ((table, 2), (table.slice(1), 1)):
        with pytest.raises(ValueError, match=f"row {row}: rollout_logprobs"):
            validate(rows, TRAJECTORY)
    validate(table.slice(3), TRAJECTORY)


def test_a_null_in_a_row_that_is_sliced_away_is_allowed(make_trajectories: MakeTable) -> None:
    table = with_value(make_trajectories(), "prompt_tokens", 0, [None])
    validate(table.slice(1), TRAJECTORY)
    with pytest.raises(ValueError, match=r"^row 0: prompt_tokens "):
        validate(table.slice(0, 1), TRAJECTORY)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("teacher_logprobs", [0.0, float("nan")], "a teacher_logprob is not finite"),
        ("teacher_top_logprobs", [-1.0, float("-inf")], "a teacher_top_logprob is not finite"),
        ("status", "elsewhere", "teacher_logprobs are there, but status is not ok"),
        ("teacher_top_tokens", [1, 2, 3, 4], "teacher_top_tokens differ in number"),
        ("teacher_logprobs", [-1.0, -1.0, -1.0], "teacher_top_tokens differ in number"),
    ],
)
def test_the_first_bad_row_of_a_teacher_is_named(name: str, value: object, reason: str) -> None:
    table = replaced(teacher_rows(0, [[-0.5], [-1.0, -2.0]]), "teacher_top_tokens", [[5], [5, 6]])
    table = replaced(table, "teacher_top_logprobs", [[-0.5], [-1.0, -2.0]])
    validate(table, TEACHER)
    with pytest.raises(ValueError, match=f"^row 1: {reason}"):
        validate(with_value(table, name, 1, value), TEACHER)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("status", "failed", "status"),
        ("reward", None, "a reward is expected"),
        ("status", "error", "a reward is expected"),
        ("reward", float("nan"), "reward is not finite"),
        ("row_id", 5, "row_id"),
    ],
)
def test_the_first_bad_score_is_named(make_scores: MakeTable, name: str, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^row 1: {reason}"):
        validate(with_value(make_scores(), name, 1, value), SCORE)
