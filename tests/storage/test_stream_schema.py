"""Columns are documented, and a table that breaks their rules is refused with its first bad row."""

from collections.abc import Callable

import pyarrow as pa
import pytest

from storage.schema import METRIC, SCORE, TRAJECTORY, check_columns, validate

MakeTable = Callable[..., pa.Table]


def replaced(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    field = table.schema.field(name)
    return table.set_column(table.column_names.index(name), name, pa.array(values, field.type))


def with_value(table: pa.Table, name: str, row: int, value: object) -> pa.Table:
    values = table.column(name).to_pylist()
    values[row] = value
    return replaced(table, name, values)


@pytest.mark.parametrize("schema", [TRAJECTORY, SCORE, METRIC])
def test_every_field_says_what_it_holds(schema: pa.Schema) -> None:
    for field in schema:
        assert len(field.metadata[b"doc"].decode()) > 15, field.name


def test_valid_tables_pass_whole_sliced_chunked_and_empty(make_trajectories: MakeTable, make_scores: MakeTable) -> None:
    for table, schema in ((make_trajectories(5, 9), TRAJECTORY), (make_scores(5, 9), SCORE)):
        validate(table, schema)
        validate(table.slice(3, 4), schema)
        validate(pa.concat_tables([table.slice(0, 4), table.slice(4)]), schema)
        validate(schema.empty_table(), schema)


def test_missing_misordered_and_mistyped_columns_are_named(make_scores: MakeTable) -> None:
    table = make_scores()
    with pytest.raises(ValueError, match=r"columns are .* expected"):
        check_columns(table.drop_columns("reward"), SCORE)
    with pytest.raises(ValueError, match=r"columns are .* expected"):
        check_columns(table.select(table.column_names[::-1]), SCORE)
    with pytest.raises(ValueError, match="column seconds is double, expected float"):
        check_columns(table.set_column(6, "seconds", pa.array([0.5] * 4, pa.float64())), SCORE)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("row_id", 3, "row 2: row_id does not continue the row before"),
        ("prompt_id", None, "row 2: prompt_id is null"),
        ("response_tokens", None, "row 2: response_tokens is null"),
        ("response_tokens", [1] * 20, "row 2: rollout_logprobs and response_tokens differ in length"),
        ("loss_mask", [], "row 2: loss_mask and response_tokens differ in length"),
        ("prompt_tokens", [1, None], "row 2: prompt_tokens holds a null"),
        ("span_starts", [0], "row 2: span_starts and span_versions differ in length"),
        ("min_policy_version", 1000, "row 2: min_policy_version is above max_policy_version"),
        ("finish_reason", "abort", "row 2: finish_reason is none of stop, length"),
    ],
)
def test_the_first_bad_trajectory_is_named(make_trajectories: MakeTable, name: str, value: object, reason: str) -> None:
    table = with_value(make_trajectories(), name, 2, value)
    with pytest.raises(ValueError, match=reason):
        validate(table, TRAJECTORY)
    chunked = pa.concat_tables([make_trajectories(0, 9).slice(7), make_trajectories(9, 1)])
    validate(chunked, TRAJECTORY)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_log_probability_that_is_not_finite_is_named_also_in_a_slice(
    make_trajectories: MakeTable, value: float
) -> None:
    table = make_trajectories()
    logprobs = table.column("rollout_logprobs").to_pylist()
    logprobs[2][-1] = value
    table = replaced(table, "rollout_logprobs", logprobs)
    with pytest.raises(ValueError, match="row 2: rollout_logprobs holds a value that is not finite"):
        validate(table, TRAJECTORY)
    with pytest.raises(ValueError, match="row 1: rollout_logprobs holds a value that is not finite"):
        validate(table.slice(1), TRAJECTORY)
    validate(table.slice(0, 2), TRAJECTORY)
    validate(table.slice(3), TRAJECTORY)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("status", "failed", "row 1: status is none of ok, timeout, error"),
        ("reward", None, "row 1: a reward is expected exactly where status is ok"),
        ("status", "error", "row 1: a reward is expected exactly where status is ok"),
        ("reward", float("nan"), "row 1: reward is not finite"),
        ("row_id", 5, "row 1: row_id does not continue the row before"),
    ],
)
def test_the_first_bad_score_is_named(make_scores: MakeTable, name: str, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        validate(with_value(make_scores(), name, 1, value), SCORE)
