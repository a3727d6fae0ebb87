"""The columns of every stream, and what makes a table of them valid.

Each field carries its documentation as metadata `doc`: unit, shape, whose policy.
Columns are fixed and flat: one value, or one list of numbers, per row. R is the number of response tokens of the row.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA_VERSION = 1


def _field(name: str, dtype: pa.DataType, doc: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, dtype, nullable=nullable, metadata={"doc": doc})


TRAJECTORY: pa.Schema = pa.schema(
    [
        _field("row_id", pa.int64(), "ordinal of the row in its stream, from 0 without gaps"),
        _field("group_id", pa.int64(), "group of trajectories that answer one prompt together"),
        _field("prompt_id", pa.string(), "name of the prompt in its prompt set"),
        _field("sample_index", pa.int32(), "ordinal of the trajectory in its group, from 0"),
        _field("prompt_tokens", pa.list_(pa.int32()), "[P] token ids the policy was given"),
        _field("response_tokens", pa.list_(pa.int32()), "[R] token ids the sampling policy drew, end token included"),
        _field(
            "rollout_logprobs",
            pa.list_(pa.float32()),
            "[R] log-probability of each response token under the policy that sampled it, after temperature and top-p, "
            "nats",
        ),
        _field("span_versions", pa.list_(pa.int64()), "[spans] policy version that sampled each run of tokens"),
        _field("span_starts", pa.list_(pa.int32()), "[spans] index of each run's first token among the R"),
        _field("min_policy_version", pa.int64(), "oldest policy version that sampled a token of the response"),
        _field("max_policy_version", pa.int64(), "newest policy version that sampled a token of the response"),
        _field("incarnation", pa.int32(), "incarnation of the trainer that made the sampling policy's weights"),
        _field("loss_mask", pa.list_(pa.uint8()), "[R] 1 where the token takes part in the loss, else 0"),
        _field("finish_reason", pa.string(), "stop: the policy ended the response; length: max_new_tokens did"),
        _field("temperature", pa.float32(), "what divided the sampling policy's logits, dimensionless; 0 is greedy"),
        _field("top_p", pa.float32(), "nucleus mass kept of the sampling policy, in (0, 1]"),
        _field("max_new_tokens", pa.int32(), "longest response allowed, tokens"),
        _field("generator", pa.int32(), "number of the generator that made the row"),
        _field("epoch", pa.int32(), "epoch of the stream's writer: how often the generator had been restarted"),
        _field("seed", pa.int64(), "seed of the random numbers the response was sampled with"),
        _field("t_admitted", pa.float64(), "when the prompt was admitted, unix seconds"),
        _field("t_started", pa.float64(), "when its first token was asked for, unix seconds"),
        _field("t_finished", pa.float64(), "when its last token was sampled, unix seconds"),
        _field("meta", pa.string(), "JSON object of the prompt: its answer, its source"),
    ]
)

SCORE: pa.Schema = pa.schema(
    [
        _field("row_id", pa.int64(), "row_id of the trajectory scored, in that trajectory's stream"),
        _field("reward", pa.float32(), "reward of the whole response, dimensionless; null unless ok", nullable=True),
        _field("components", pa.string(), "JSON object: the parts the reward was made of, by name"),
        _field("status", pa.string(), "ok, timeout or error: what became of the verification"),
        _field("error", pa.string(), "one sentence on what failed; null where ok", nullable=True),
        _field("verifier_version", pa.string(), "version of the code that scored the row"),
        _field("seconds", pa.float32(), "time the verification took, seconds"),
    ]
)

METRIC: pa.Schema = pa.schema(
    [
        _field("t", pa.float64(), "when it was measured, unix seconds"),
        _field("incarnation", pa.int32(), "incarnation of the trainer whose weights were in use"),
        _field("policy_version", pa.int64(), "policy version it was measured at or with"),
        _field("name", pa.string(), "what was measured, its unit as the name's last word where it has one"),
        _field("value", pa.float64(), "the measured value, in the unit of its name"),
    ]
)

_FINISH_REASONS = ("stop", "length")
_STATUSES = ("ok", "timeout", "error")


def check_columns(table: pa.Table, schema: pa.Schema) -> None:
    """Raises ValueError unless `table` has exactly the columns of `schema`: names, order and types."""
    if table.column_names != schema.names:
        raise ValueError(f"columns are {table.column_names}, expected {schema.names}")
    for found, expected in zip(table.schema, schema, strict=True):
        if found.type != expected.type:
            raise ValueError(f"column {expected.name} is {found.type}, expected {expected.type}")


def validate(table: pa.Table, schema: pa.Schema) -> None:
    """Check a table before it is committed. Raises ValueError that names the first bad row, counted from 0.

    Every schema: columns as declared, no null where none is allowed, row_ids consecutive.
    TRAJECTORY: per-token columns of one length, finite log-probs, min_ ≤ max_policy_version, known finish reasons.
    SCORE: known statuses, and a finite reward exactly where the status is ok.
    """
    check_columns(table, schema)
    columns = {name: table.column(name).combine_chunks() for name in schema.names}
    _check_nulls(columns, schema)
    if "row_id" in columns:
        row_ids = _numpy(columns["row_id"])
        expected = row_ids[:1] + np.arange(len(row_ids))
        _refuse(row_ids != expected, "row_id does not continue the row before")
    if schema.equals(TRAJECTORY):
        _validate_trajectories(columns)
    elif schema.equals(SCORE):
        _validate_scores(columns)


def _check_nulls(columns: dict[str, pa.Array], schema: pa.Schema) -> None:
    for field in schema:
        column = columns[field.name]
        if not field.nullable:
            _refuse(_numpy(column.is_null()), f"{field.name} is null")
        if pa.types.is_list(field.type):
            values = column.flatten()
            _refuse(_numpy(values.is_null()), f"{field.name} holds a null", column)


def _validate_trajectories(columns: dict[str, pa.Array]) -> None:
    _check_same_lengths(columns, "response_tokens", ("rollout_logprobs", "loss_mask"))
    _check_same_lengths(columns, "span_versions", ("span_starts",))
    logprobs = columns["rollout_logprobs"]
    _refuse(~np.isfinite(_numpy(logprobs.flatten())), "rollout_logprobs holds a value that is not finite", logprobs)
    oldest, newest = _numpy(columns["min_policy_version"]), _numpy(columns["max_policy_version"])
    _refuse(oldest > newest, "min_policy_version is above max_policy_version")
    _check_known(columns, "finish_reason", _FINISH_REASONS)


def _validate_scores(columns: dict[str, pa.Array]) -> None:
    _check_known(columns, "status", _STATUSES)
    ok = _numpy(pc.equal(columns["status"], "ok"))
    reward = columns["reward"]
    _refuse(ok != _numpy(reward.is_valid()), "a reward is expected exactly where status is ok, for a failure is no 0")
    _refuse(ok & ~np.isfinite(_numpy(reward.fill_null(0.0))), "reward is not finite")


def _check_same_lengths(columns: dict[str, pa.Array], name: str, others: Iterable[str]) -> None:
    lengths = _numpy(pc.list_value_length(columns[name]))
    for other in others:
        unequal = _numpy(pc.list_value_length(columns[other])) != lengths
        _refuse(unequal, f"{other} and {name} differ in length")


def _check_known(columns: dict[str, pa.Array], name: str, known: tuple[str, ...]) -> None:
    unknown = ~_numpy(pc.is_in(columns[name], value_set=pa.array(known)))
    _refuse(unknown, f"{name} is none of {', '.join(known)}")


def _refuse(bad: npt.NDArray[np.bool_], reason: str, lists: pa.ListArray | None = None) -> None:
    """Raise for the first True in `bad`: one flag per row, or one per flat value of the column `lists`."""
    if bad.any():
        first = int(bad.argmax())
        row = first if lists is None else pc.list_parent_indices(lists)[first].as_py()
        raise ValueError(f"row {row}: {reason}")


def _numpy(array: pa.Array) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values
