"""The columns of every stream, and what makes a table of them valid.

Each field carries metadata: `doc` (unit, shape, whose policy), `since` (schema version that brought it) and, where that
is not the first, `default` (JSON: its value in the rows of older parts). Versions add columns, and change nothing else.
Columns are fixed and flat: one value, or one list of numbers, per row. R is the number of response tokens of the row.
"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA_VERSION = 2
"""Version 2: commit records carry their own checksum, and what the writer promises of the rows. No new column."""


def column(
    name: str, dtype: pa.DataType, doc: str, *, nullable: bool = False, since: int = 1, default: object = None
) -> pa.Field:
    """A field with its documentation; `default` is what rows written before schema version `since` get."""
    metadata = {"doc": doc, "since": str(since)}
    if since > 1:
        metadata["default"] = json.dumps(default)
    return pa.field(name, dtype, nullable=nullable, metadata=metadata)


TRAJECTORY: pa.Schema = pa.schema(
    [
        column("row_id", pa.int64(), "ordinal of the row in its stream, from 0 without gaps"),
        column("group_id", pa.int64(), "group of trajectories that answer one prompt together"),
        column("prompt_id", pa.string(), "name of the prompt in its prompt set"),
        column("sample_index", pa.int32(), "ordinal of the trajectory in its group, from 0"),
        column("prompt_tokens", pa.list_(pa.int32()), "[P] token ids the policy was given"),
        column(
            "response_tokens",
            pa.list_(pa.int32()),
            "[R] token ids the sampling policy drew, end tokens too, or its environment wrote: there loss_mask is 0",
        ),
        column(
            "rollout_logprobs",
            pa.list_(pa.float32()),
            "[R] log-probability of each response token under the policy that sampled it, after temperature and top-p, "
            "nats; 0 where an environment wrote the token",
        ),
        column("span_versions", pa.list_(pa.int64()), "[spans] policy version that sampled each run of tokens"),
        column("span_starts", pa.list_(pa.int32()), "[spans] index of each run's first token among the R"),
        column("min_policy_version", pa.int64(), "oldest policy version that sampled a token of the response"),
        column("max_policy_version", pa.int64(), "newest policy version that sampled a token of the response"),
        column("incarnation", pa.int32(), "incarnation of the trainer that made the sampling policy's weights"),
        column("loss_mask", pa.list_(pa.uint8()), "[R] 1 where the token takes part in the loss, else 0"),
        column(
            "finish_reason",
            pa.string(),
            "stop: the policy or its environment ended the response; length: max_new_tokens or the limit of turns did",
        ),
        column("temperature", pa.float32(), "what divided the sampling policy's logits, dimensionless; 0 is greedy"),
        column("top_p", pa.float32(), "nucleus mass kept of the sampling policy, in (0, 1]"),
        column("max_new_tokens", pa.int32(), "longest response allowed, tokens"),
        column("generator", pa.int32(), "number of the generator that made the row"),
        column("epoch", pa.int32(), "epoch of the stream's writer: how often the generator had been restarted"),
        column("seed", pa.int64(), "seed of the random numbers the response was sampled with"),
        column("t_admitted", pa.float64(), "when the prompt was admitted, unix seconds"),
        column("t_started", pa.float64(), "when its first token was asked for, unix seconds"),
        column("t_finished", pa.float64(), "when its last token was sampled, unix seconds"),
        column(
            "meta",
            pa.string(),
            "JSON object of the prompt: its answer, its source; environment_error where that ended the response",
        ),
    ]
)

SCORE: pa.Schema = pa.schema(
    [
        column("row_id", pa.int64(), "row_id of the trajectory scored, in that trajectory's stream"),
        column("reward", pa.float32(), "reward of the whole response, dimensionless; null unless ok", nullable=True),
        column("components", pa.string(), "JSON object: the parts the reward was made of, by name"),
        column("status", pa.string(), "ok, timeout or error: what became of the verification"),
        column("error", pa.string(), "one sentence on what failed; null where ok", nullable=True),
        column("verifier_version", pa.string(), "version of the code that scored the row"),
        column("seconds", pa.float32(), "time the verification took, seconds"),
    ]
)

CONSUMED: pa.Schema = pa.schema(
    [
        column("t", pa.float64(), "when the step was done that it was taken for, unix seconds"),
        column("incarnation", pa.int32(), "incarnation of the trainer that took it"),
        column("policy_version", pa.int64(), "policy version that the step made which it was taken for"),
        column("generator", pa.int32(), "number of the generator that made the trajectory"),
        column("trajectory_row_id", pa.int64(), "row_id of the trajectory, in its generator's stream"),
        column("group_id", pa.int64(), "group of the trajectory; -1 where its part can't be read"),
        column("sample_index", pa.int32(), "ordinal of the trajectory in its group, from 0"),
        column("outcome", pa.string(), "trained, or the drop_reason: stale, error, corrupt, rolled_back"),
        column(
            "staleness",
            pa.int32(),
            "of its group, policy versions: the trainer's when it took the group, less the oldest that sampled any of "
            "it",
        ),
        column(
            "staleness_in_flight",
            pa.int32(),
            "what of the staleness came about while the group was sampled, policy versions; the rest while it lay in "
            "queues",
        ),
        column("min_policy_version", pa.int64(), "oldest policy version that sampled a token of the response"),
        column("max_policy_version", pa.int64(), "newest policy version that sampled a token of the response"),
        column("tokens", pa.int32(), "[R] response tokens; its share of them where its part can't be read"),
        column("reward", pa.float32(), "reward of the whole response; null where the verifier failed", nullable=True),
        column("advantage", pa.float32(), "what its tokens were weighted with; null unless trained", nullable=True),
    ]
)

TRAINER_LOGPROBS: pa.Schema = pa.schema(
    [
        column("incarnation", pa.int32(), "incarnation of the trainer"),
        column("policy_version", pa.int64(), "policy version that the step made which the trajectory was trained in"),
        column("generator", pa.int32(), "number of the generator that made the trajectory"),
        column("trajectory_row_id", pa.int64(), "row_id of the trajectory, in its generator's stream"),
        column(
            "trainer_logprobs",
            pa.list_(pa.float32()),
            "[R] log-probability of each response token under the policy in training before the step, at the rollout's "
            "temperature, nats",
        ),
    ]
)

METRIC: pa.Schema = pa.schema(
    [
        column("t", pa.float64(), "when it was measured, unix seconds"),
        column("incarnation", pa.int32(), "incarnation of the trainer whose weights were in use"),
        column("policy_version", pa.int64(), "policy version it was measured at or with"),
        column("name", pa.string(), "what was measured, its unit as the name's last word where it has one"),
        column("value", pa.float64(), "the measured value, in the unit of its name"),
    ]
)

_PER_TOKEN = ("response_tokens", "rollout_logprobs", "loss_mask")
_FINISH_REASONS = pa.array(["stop", "length"])
_STATUSES = pa.array(["ok", "timeout", "error"])


def check_columns(found: pa.Schema, schema: pa.Schema, version: int = SCHEMA_VERSION) -> None:
    """Raises ValueError unless `found` has exactly the columns that `schema` had at `version`: names, order, types."""
    if version == SCHEMA_VERSION and found.equals(schema):
        # Nearly every part: the way below costs as much as verifying a megabyte.
        return
    expected = [field for field in schema if since(field) <= version]
    names = [field.name for field in expected]
    if found.names != names:
        raise ValueError(f"columns are {found.names}, expected {names}")
    for field in expected:
        if found.field(field.name).type != field.type:
            raise ValueError(f"column {field.name} is {found.field(field.name).type}, expected {field.type}")


def with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of `table` that `schema` has; where it has more, added since the rows were written, their default."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    arrays = [columns[f.name] if f.name in columns else _defaults(f, table.num_rows) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def since(field: pa.Field) -> int:
    """The schema version that brought this column."""
    return int((field.metadata or {}).get(b"since", 1))


def _defaults(field: pa.Field, rows: int) -> pa.Array:
    value = json.loads(field.metadata[b"default"])
    return pa.repeat(pa.scalar(value, field.type), rows)


def validate(table: pa.Table, schema: pa.Schema, *, vocab_size: int = 0, group_size: int = 0) -> pa.Table:
    """Check rows, before they are committed and after they are read. Raises ValueError that names the first bad row.

    Returns the same rows, each column in one chunk: a copy where they were in several, else `table` itself.
    Rows count from 0. A rule about several columns holds where `schema` has them all:
    every column  as declared, sound Arrow, no null where none is allowed; row_ids consecutive
    trajectories  per-token columns of one length; token ids in [0, vocab_size) unless that is 0; log-probs finite;
                  spans ascending, from 0 on where there are tokens; min_ ≤ max_policy_version; known finish reasons;
                  groups whole, of `group_size` rows unless that is 0: one group_id, sample_index from 0
    scores        known statuses, and a finite reward exactly where the status is ok
    """
    check_columns(table.schema, schema)
    # Without it, offsets that lead out of their column would be followed.
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
        # Known without a look at the values, unless some are null: perhaps of other rows, where this is a slice.
        if isinstance(array, pa.ListArray) and array.values.null_count:
            _refuse_value(_numpy(array.flatten().is_null()), f"{field.name} holds a null", array)


def _check_tokens(columns: dict[str, pa.Array], vocab_size: int) -> None:
    per_token = [name for name in _PER_TOKEN if name in columns]
    for name in per_token[1:]:
        unequal = _lengths(columns[name]) != _lengths(columns[per_token[0]])
        _refuse(unequal, f"{name} and {per_token[0]} differ in length")
    for name in ("prompt_tokens", "response_tokens"):
        if vocab_size and name in columns:
            # As unsigned numbers, those below 0 are the largest: one pass instead of two.
            ids = _flat(columns[name]).view(np.uint32)
            if ids.max(initial=0) >= vocab_size:
                reason = f"{name} holds a token id outside [0, {vocab_size})"
                _refuse_value(ids >= vocab_size, reason, columns[name])
    if "rollout_logprobs" in columns:
        logprobs = _flat(columns["rollout_logprobs"])
        with np.errstate(over="ignore", invalid="ignore"):
            # The sum of squares is finite only if every term is; it takes less than looking at each, or than a sum.
            finite = np.isfinite(np.dot(logprobs, logprobs))
        if not finite:
            # Large ones may overflow it: none of them is refused for that.
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
        _refuse(beyond, "a span starts behind the last token")


def _check_groups(group_ids: npt.NDArray[Any], sample_indices: npt.NDArray[Any], group_size: int) -> None:
    rows = np.arange(len(group_ids))
    first = rows - rows % group_size
    # Where the rows do not fill the last group, every row of it is short of the others.
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
        reason = "a reward is expected exactly where status is ok, for a failure is no 0"
        _refuse(ok != _numpy(rewards.is_valid()), reason)
    _refuse(~np.isfinite(_numpy(rewards.fill_null(0.0))), "reward is not finite")


def _check_known(columns: dict[str, pa.Array], name: str, known: pa.StringArray) -> None:
    unknown = ~_numpy(pc.is_in(columns[name], value_set=known))
    _refuse(unknown, f"{name} is none of {', '.join(known.to_pylist())}")


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
    # Empty tables may have none. One chunk would be copied.
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
