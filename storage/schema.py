"""The columns of every stream, and what makes a table of them valid.

Each field has metadata: `doc` (unit, shape, whose policy), `since` (schema version that added it) and, after the first
version, `default` (JSON: its value in rows of older parts). New versions only add columns. Columns are fixed and flat:
one value, or one list of numbers, per row. R is the number of response tokens of the row.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA_VERSION = 3
"""Version 2: commit records carry their own checksum and the writer's guarantees about the rows. No new column.
Version 3: commit records name the groups of a part, and those that are not committed yet. New stream: unfinished. New
column: `masked_tokens` of consumed trajectories."""


def column(
    name: str, dtype: pa.DataType, doc: str, *, nullable: bool = False, since: int = 1, default: object = None
) -> pa.Field:
    """A documented field; `default` is its value in rows written before schema version `since`."""
    metadata = {"doc": doc, "since": str(since)}
    if since > 1:
        metadata["default"] = json.dumps(default)
    return pa.field(name, dtype, nullable=nullable, metadata=metadata)


TRAJECTORY: pa.Schema = pa.schema(
    [
        column("row_id", pa.int64(), "index of the row in its stream, from 0 without gaps"),
        column("group_id", pa.int64(), "group of the trajectories that answer the same prompt"),
        column("prompt_id", pa.string(), "id of the prompt in its prompt set"),
        column("sample_index", pa.int32(), "index of the trajectory in its group, from 0"),
        column("prompt_tokens", pa.list_(pa.int32()), "[P] token ids of the prompt"),
        column(
            "response_tokens",
            pa.list_(pa.int32()),
            "[R] token ids sampled by the policy, end tokens included, or written by its environment (loss_mask 0)",
        ),
        column(
            "rollout_logprobs",
            pa.list_(pa.float32()),
            "[R] log-probability of each response token under the policy that sampled it, after temperature and top-p, "
            "nats; 0 for tokens written by an environment",
        ),
        column("span_versions", pa.list_(pa.int64()), "[spans] policy version that sampled each span of tokens"),
        column("span_starts", pa.list_(pa.int32()), "[spans] index of each span's first token in the response"),
        column("min_policy_version", pa.int64(), "oldest policy version that sampled a token of the response"),
        column("max_policy_version", pa.int64(), "newest policy version that sampled a token of the response"),
        column("incarnation", pa.int32(), "incarnation of the trainer that made the sampling policy's weights"),
        column("loss_mask", pa.list_(pa.uint8()), "[R] 1 if the token takes part in the loss, else 0"),
        column(
            "finish_reason",
            pa.string(),
            "stop: ended by the policy or its environment; length: ended by max_new_tokens or the limit of turns",
        ),
        column("temperature", pa.float32(), "divisor of the sampling policy's logits, dimensionless; 0 is greedy"),
        column("top_p", pa.float32(), "nucleus probability mass of the sampling policy, in (0, 1]"),
        column("max_new_tokens", pa.int32(), "maximum length of the response, tokens"),
        column("generator", pa.int32(), "number of the generator that made the row"),
        column("epoch", pa.int32(), "epoch of the stream's writer: the number of restarts of the generator"),
        column("seed", pa.int64(), "random seed the response was sampled with"),
        column("t_admitted", pa.float64(), "when the prompt was admitted, unix seconds"),
        column("t_started", pa.float64(), "when its first token was requested, unix seconds"),
        column("t_finished", pa.float64(), "when its last token was sampled, unix seconds"),
        column(
            "meta",
            pa.string(),
            "JSON object: the prompt's answer and source; environment_error if that ended the response",
        ),
    ]
)

UNFINISHED: pa.Schema = pa.schema(
    [
        column("group_id", pa.int64(), "group of the trajectory, which is not whole yet"),
        column("sample_index", pa.int32(), "index of the trajectory in its group, from 0"),
        column("response_tokens", pa.list_(pa.int32()), "[R] token ids so far"),
        column(
            "rollout_logprobs",
            pa.list_(pa.float32()),
            "[R] log-probability of each token under the policy that sampled it, after temperature and top-p, nats",
        ),
        column(
            "loss_mask", pa.list_(pa.uint8()), "[R] 1 if the policy sampled the token, 0 if an environment wrote it"
        ),
        column("span_versions", pa.list_(pa.int64()), "[spans] policy version that sampled each span of tokens"),
        column("span_starts", pa.list_(pa.int32()), "[spans] index of each span's first token in the response"),
        column("min_policy_version", pa.int64(), "oldest policy version that sampled a token of the response"),
        column("max_policy_version", pa.int64(), "newest policy version that sampled a token of the response"),
        column("incarnation", pa.int32(), "incarnation of the trainer that made the newest of these weights"),
        column("finish_reason", pa.string(), "as of a trajectory; null if the response is unfinished", nullable=True),
        column("environment_error", pa.string(), "exception of the environment that ended it", nullable=True),
        column("t_admitted", pa.float64(), "when the prompt was admitted, unix seconds"),
        column("t_started", pa.float64(), "when its first token was requested, unix seconds"),
        column("t_finished", pa.float64(), "when its last token was sampled, unix seconds; 0 if it is unfinished"),
    ]
)
"""A part is all that one generator had in flight at one moment; only the newest part counts."""

SCORE: pa.Schema = pa.schema(
    [
        column("row_id", pa.int64(), "row_id of the scored trajectory in its stream"),
        column("reward", pa.float32(), "reward of the whole response, dimensionless; null unless ok", nullable=True),
        column("components", pa.string(), "JSON object: the components of the reward by name"),
        column("status", pa.string(), "outcome of the verification: ok, timeout or error"),
        column("error", pa.string(), "one sentence on what failed; null if ok", nullable=True),
        column("verifier_version", pa.string(), "version of the code that scored the row"),
        column("seconds", pa.float32(), "duration of the verification, seconds"),
    ]
)

CONSUMED: pa.Schema = pa.schema(
    [
        column("t", pa.float64(), "when the step that consumed it was done, unix seconds"),
        column("incarnation", pa.int32(), "incarnation of the trainer that consumed it"),
        column("policy_version", pa.int64(), "policy version made by the step that consumed it"),
        column("generator", pa.int32(), "number of the generator that made the trajectory"),
        column("trajectory_row_id", pa.int64(), "row_id of the trajectory in its generator's stream"),
        column("group_id", pa.int64(), "group of the trajectory; -1 if its part can't be read"),
        column("sample_index", pa.int32(), "index of the trajectory in its group, from 0"),
        column("outcome", pa.string(), "trained, or the drop_reason: stale, error, corrupt, rolled_back"),
        column(
            "staleness",
            pa.int32(),
            "of its group, policy versions: the trainer's when it took the group, minus the oldest one that sampled it "
            "(masked tokens aside)",
        ),
        column(
            "staleness_in_flight",
            pa.int32(),
            "part of the staleness that arose while the group was sampled, policy versions; the rest arose in queues",
        ),
        column("min_policy_version", pa.int64(), "oldest policy version that sampled a token of the response"),
        column("max_policy_version", pa.int64(), "newest policy version that sampled a token of the response"),
        column("tokens", pa.int32(), "number of response tokens; an equal share of the part's if that can't be read"),
        column("reward", pa.float32(), "reward of the whole response; null if the verifier failed", nullable=True),
        column("advantage", pa.float32(), "advantage of its tokens; null unless trained", nullable=True),
        column(
            "masked_tokens",
            pa.int32(),
            "response tokens without loss because they were too old, the oldest ones; 0 if its group was dropped",
            since=3,
            default=0,
        ),
    ]
)

TRAINER_LOGPROBS: pa.Schema = pa.schema(
    [
        column("incarnation", pa.int32(), "incarnation of the trainer"),
        column("policy_version", pa.int64(), "policy version made by the step that trained on it"),
        column("generator", pa.int32(), "number of the generator that made the trajectory"),
        column("trajectory_row_id", pa.int64(), "row_id of the trajectory in its generator's stream"),
        column(
            "trainer_logprobs",
            pa.list_(pa.float32()),
            "[R] log-probability of each response token under the trained policy before the step, at the temperature "
            "it was sampled with, nats",
        ),
    ]
)

METRIC: pa.Schema = pa.schema(
    [
        column("t", pa.float64(), "when it was measured, unix seconds"),
        column("incarnation", pa.int32(), "incarnation of the trainer whose weights were in use"),
        column("policy_version", pa.int64(), "policy version it was measured at or with"),
        column("name", pa.string(), "name of the metric; its last word is the unit, if there is one"),
        column("value", pa.float64(), "the measured value, in the unit of its name"),
    ]
)

_PER_TOKEN = ("response_tokens", "rollout_logprobs", "loss_mask")
_FINISH_REASONS = ("stop", "length")
_STATUSES = ("ok", "timeout", "error")


def check_columns(found: pa.Schema, schema: pa.Schema, version: int = SCHEMA_VERSION) -> None:
    """Raises ValueError unless `found` has exactly the columns that `schema` had at `version`: names, order, types."""
    if version == SCHEMA_VERSION and found.equals(schema):
        # Nearly always so; the check below costs as much as verifying a megabyte.
        return
    expected = [field for field in schema if since(field) <= version]
    names = [field.name for field in expected]
    if found.names != names:
        raise ValueError(f"columns are {found.names}, expected {names}")
    for field in expected:
        if found.field(field.name).type != field.type:
            raise ValueError(f"column {field.name} is {found.field(field.name).type}, expected {field.type}")


def with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with the columns of `schema`; columns added after the rows were written get their default."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    arrays = [columns[f.name] if f.name in columns else _defaults(f, table.num_rows) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def since(field: pa.Field) -> int:
    """The schema version that added this column."""
    return int((field.metadata or {}).get(b"since", 1))


def _defaults(field: pa.Field, rows: int) -> pa.Array:
    value = json.loads(field.metadata[b"default"])
    return pa.repeat(pa.scalar(value, field.type), rows)


def validate(table: pa.Table, schema: pa.Schema, *, vocab_size: int = 0, group_size: int = 0) -> pa.Table:
    """Check rows before a commit and after a read. Raises ValueError that names the first bad row.

    Returns the same rows with one chunk per column; columns with several chunks are copied. Rows count from 0. A rule
    about several columns applies if `schema` has them all:
    every column  declared type, valid Arrow, no null unless nullable; row_ids consecutive
    trajectories  per-token columns of one length; token ids in [0, vocab_size) unless that is 0; log-probs finite;
                  spans ascending from 0, none only without tokens; min_ ≤ max_policy_version; known finish reasons;
                  groups whole, of `group_size` rows unless that is 0: one group_id, sample_index from 0
    scores        known statuses, and a finite reward if and only if the status is ok
    """
    check_columns(table.schema, schema)
    # Otherwise offsets that point outside their column would be followed.
    table.validate(full=True)
    table = table.combine_chunks()
    columns = {name: _whole(column) for name, column in zip(schema.names, table.columns, strict=True)}
    _check_nulls(columns, schema)
    if "row_id" in columns:
        row_ids = _numpy(columns["row_id"])
        _refuse(row_ids != row_ids[:1] + np.arange(len(row_ids)), "row_id does not continue the row before")
    _check_tokens(columns, vocab_size)
    _check_spans(columns)
    if {"min_policy_version", "max_policy_version"} <= columns.keys():
        oldest, newest = _numpy(columns["min_policy_version"]), _numpy(columns["max_policy_version"])
        _refuse(oldest > newest, "min_policy_version is above max_policy_version")
    if "finish_reason" in columns:
        _check_known(columns, "finish_reason", _FINISH_REASONS)
    if group_size and {"group_id", "sample_index"} <= columns.keys():
        _check_groups(_numpy(columns["group_id"]), _numpy(columns["sample_index"]), group_size)
    _check_scores(columns)
    return table


def _check_nulls(columns: dict[str, pa.Array], schema: pa.Schema) -> None:
    for field, array in zip(schema, columns.values(), strict=True):
        if not field.nullable and array.null_count:
            _refuse(_numpy(array.is_null()), f"{field.name} is null")
        # Usually decided without reading values. If this is a slice, the nulls may be of other rows.
        if isinstance(array, pa.ListArray) and array.values.null_count:
            _refuse_value(_numpy(array.flatten().is_null()), f"{field.name} holds a null", array)


def _check_tokens(columns: dict[str, pa.Array], vocab_size: int) -> None:
    per_token = [name for name in _PER_TOKEN if name in columns]
    for name in per_token[1:]:
        unequal = _lengths(columns[name]) != _lengths(columns[per_token[0]])
        _refuse(unequal, f"{name} and {per_token[0]} differ in length")
    for name in ("prompt_tokens", "response_tokens"):
        if vocab_size and name in columns:
            # As unsigned numbers, negative ids are the largest, so one pass is enough.
            ids = _flat(columns[name]).view(np.uint32)
            if ids.max(initial=0) >= vocab_size:
                reason = f"{name} holds a token id outside [0, {vocab_size})"
                _refuse_value(ids >= vocab_size, reason, columns[name])
    if "rollout_logprobs" in columns:
        logprobs = _flat(columns["rollout_logprobs"])
        with np.errstate(over="ignore", invalid="ignore"):
            # A sum of squares is finite only if every term is; this is faster than isfinite on each value.
            finite = np.isfinite(np.dot(logprobs, logprobs))
        if not finite:
            # Large finite values may overflow the sum; they are accepted.
            reason = "rollout_logprobs holds a value that is not finite"
            _refuse_value(~np.isfinite(logprobs), reason, columns["rollout_logprobs"])


def _check_spans(columns: dict[str, pa.Array]) -> None:
    if "span_starts" not in columns:
        return
    starts, lengths = _flat(columns["span_starts"]), _lengths(columns["span_starts"])
    if "span_versions" in columns:
        _refuse(_lengths(columns["span_versions"]) != lengths, "span_starts and span_versions differ in length")
    ends = np.cumsum(lengths)
    is_first = np.zeros(len(starts) + 1, bool)
    is_first[ends - lengths] = True
    is_first = is_first[:-1]
    _refuse_value(is_first & (starts != 0), "the first span does not start at token 0", columns["span_starts"])
    falling = ~is_first & (starts <= np.concatenate([starts[:1], starts[:-1]]))
    _refuse_value(falling, "span_starts is not ascending", columns["span_starts"])
    per_token = [name for name in _PER_TOKEN if name in columns]
    if per_token:
        num_tokens = _lengths(columns[per_token[0]])
        _refuse((num_tokens > 0) & (lengths == 0), "tokens without a span")
        has_span = lengths > 0
        beyond = np.zeros(len(lengths), bool)
        beyond[has_span] = starts[ends[has_span] - 1] > num_tokens[has_span]
        _refuse(beyond, "a span starts after the last token")


def _check_groups(group_ids: npt.NDArray[Any], sample_indices: npt.NDArray[Any], group_size: int) -> None:
    rows = np.arange(len(group_ids))
    first = rows - rows % group_size
    # The rows of an incomplete last group.
    short = first + group_size > len(group_ids)
    _refuse(group_ids != group_ids[first], f"group_id changes within {group_size} rows that are one group")
    _refuse(sample_indices != rows - first, f"sample_index does not count the {group_size} rows of its group from 0")
    again = (rows == first) & (rows > 0) & (group_ids == np.concatenate([group_ids[:1], group_ids[:-1]]))
    _refuse(again, f"the group has more than {group_size} rows")
    _refuse(short, f"the group has fewer than {group_size} rows")


def _check_scores(columns: dict[str, pa.Array]) -> None:
    if "status" in columns:
        _check_known(columns, "status", _STATUSES)
    if "reward" not in columns:
        return
    rewards = columns["reward"]
    if "status" in columns:
        ok = _numpy(pc.equal(columns["status"], "ok"))
        reason = "a reward is expected if and only if status is ok: a failure is not a reward of 0"
        _refuse(ok != _numpy(rewards.is_valid()), reason)
    _refuse(~np.isfinite(_numpy(rewards.fill_null(0.0))), "reward is not finite")


def _check_known(columns: dict[str, pa.Array], name: str, known: Sequence[str]) -> None:
    # Arrow imports pandas, if there is one, for the first list that it takes. So no list at import.
    unknown = ~_numpy(pc.or_(pc.is_in(columns[name], value_set=pa.array(known)), pc.is_null(columns[name])))
    _refuse(unknown, f"{name} is none of {', '.join(known)}")


def _refuse(bad: npt.NDArray[np.bool_], reason: str) -> None:
    """Raise for the first True in `bad`, one flag per row."""
    if bad.any():
        raise ValueError(f"row {int(bad.argmax())}: {reason}")


def _refuse_value(bad: npt.NDArray[np.bool_], reason: str, lists: pa.ListArray) -> None:
    """Raise for the first True in `bad`, one flag per flat value of the column `lists`."""
    if bad.any():
        ends = np.cumsum(_lengths(lists))
        raise ValueError(f"row {int(np.searchsorted(ends, bad.argmax(), side='right'))}: {reason}")


def _whole(column: pa.ChunkedArray) -> pa.Array:
    # combine_chunks would copy a single chunk. An empty table may have no chunk.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _lengths(lists: pa.ListArray) -> npt.NDArray[Any]:
    offsets = _numpy(lists.offsets)
    lengths: npt.NDArray[Any] = offsets[1:] - offsets[:-1]
    return lengths


def _flat(lists: pa.ListArray) -> npt.NDArray[Any]:
    return _numpy(lists.flatten())


def _numpy(array: pa.Array) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values
