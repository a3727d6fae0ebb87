"""Validates a table of a stream's rows, before a commit and after a read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.schema import check_columns

_PER_TOKEN = ("response_tokens", "rollout_logprobs", "loss_mask")
_FINISH_REASONS = ("stop", "length")
_STATUSES = ("ok", "timeout", "error", "elsewhere")


def validate(table: pa.Table, schema: pa.Schema, *, vocab_size: int = 0, group_size: int = 0) -> pa.Table:
    """Check rows before a commit and after a read. Raises ValueError that names the first bad row.

    Returns the same rows with one chunk per column; columns with several chunks are copied. Rows count from 0. A rule
    about several columns applies if `schema` has them all:
    every column  declared type, valid Arrow, no null unless nullable; row_ids consecutive
    trajectories  per-token columns of one length; token ids in [0, vocab_size) unless that is 0; log-probs finite;
                  a truncated token among its kept ones; spans ascending from 0, none only without tokens;
                  min_ ≤ max_policy_version; known finish reasons;
                  messages ascending, each with a role; as many routed experts for each token;
                  groups whole, of `group_size` rows unless that is 0: one group_id, sample_index from 0
    scores        known statuses, and a finite reward if and only if the status is ok
    teachers      known statuses; log-probs finite, and none unless the status is ok; as many likeliest tokens for each
                  token, with a log-prob each
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
    _check_kept(columns)
    _check_spans(columns)
    _check_messages(columns)
    _check_experts(columns)
    if {"min_policy_version", "max_policy_version"} <= columns.keys():
        oldest, newest = _numpy(columns["min_policy_version"]), _numpy(columns["max_policy_version"])
        _refuse(oldest > newest, "min_policy_version is above max_policy_version")
    if "finish_reason" in columns:
        _check_is_in(columns, "finish_reason", _FINISH_REASONS)
    if group_size and {"group_id", "sample_index"} <= columns.keys():
        _check_groups(_numpy(columns["group_id"]), _numpy(columns["sample_index"]), group_size)
    _check_annotations(columns)
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
    for name in ("prompt_tokens", "response_tokens", "kept_tokens"):
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


def _check_kept(columns: dict[str, pa.Array]) -> None:
    if not {"response_tokens", "kept_tokens", "kept_counts"} <= columns.keys():
        return
    counts, num_counts = _flat(columns["kept_counts"]), _lengths(columns["kept_counts"])
    num_tokens, num_kept = _lengths(columns["response_tokens"]), _lengths(columns["kept_tokens"])
    truncated = num_counts > 0
    _refuse(truncated & (num_counts != num_tokens), "kept_counts and response_tokens differ in length")
    _refuse_value(counts < 0, "kept_counts holds a negative number", columns["kept_counts"])
    rows = np.repeat(np.arange(len(num_counts)), num_counts)
    sums = np.bincount(rows, weights=counts, minlength=len(num_counts))
    _refuse(sums != num_kept, "kept_counts do not add up to the number of kept_tokens")
    # A token that was drawn from others than these would have probability 0 in the trainer.
    tokens = _flat(columns["response_tokens"])[np.repeat(truncated, num_tokens)]
    is_drawn = np.repeat(tokens, counts) == _flat(columns["kept_tokens"])
    missing = counts > 0
    missing[np.repeat(np.arange(len(counts)), counts)[is_drawn]] = False
    _refuse_value(missing, "a response token is none of its kept_tokens", columns["kept_counts"])


def _check_spans(columns: dict[str, pa.Array]) -> None:
    if "span_starts" not in columns:
        return
    starts = columns["span_starts"]
    if "span_versions" in columns:
        _refuse(
            _lengths(columns["span_versions"]) != _lengths(starts), "span_starts and span_versions differ in length"
        )
    is_first, step = _steps(starts)
    _refuse_value(is_first & (step != 0), "the first span does not start at token 0", starts)
    _refuse_value(~is_first & (step <= 0), "span_starts is not ascending", starts)
    per_token = [name for name in _PER_TOKEN if name in columns]
    if per_token:
        num_tokens = _lengths(columns[per_token[0]])
        _refuse((num_tokens > 0) & (_lengths(starts) == 0), "tokens without a span")
        _refuse(_last(starts) > num_tokens, "a span starts after the last token")


def _check_messages(columns: dict[str, pa.Array]) -> None:
    if not {"message_roles", "message_starts", "prompt_tokens", "response_tokens"} <= columns.keys():
        return
    starts = columns["message_starts"]
    _refuse(_lengths(columns["message_roles"]) != _lengths(starts), "message_starts and message_roles differ in length")
    _refuse_value(_steps(starts)[1] < 0, "message_starts is not ascending from 0", starts)
    num_tokens = _lengths(columns["prompt_tokens"]) + _lengths(columns["response_tokens"])
    _refuse(_last(starts) > num_tokens, "a message starts after the last token")


def _steps(lists: pa.ListArray) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Per flat value of `lists`: whether it is its row's first, and its distance to the one before it, or to 0."""
    values, lengths = _flat(lists).astype(np.int64), _lengths(lists)
    is_first = np.zeros(len(values) + 1, bool)
    is_first[np.cumsum(lengths) - lengths] = True
    is_first = is_first[:-1]
    return is_first, np.where(is_first, values, np.diff(values, prepend=0))


def _last(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    """The last value of each row, 0 for an empty row."""
    lengths = _lengths(lists)
    last = np.zeros(len(lengths), np.int64)
    last[lengths > 0] = _flat(lists)[np.cumsum(lengths)[lengths > 0] - 1]
    return last


def _check_experts(columns: dict[str, pa.Array]) -> None:
    if not {"routed_experts", "prompt_tokens", "response_tokens"} <= columns.keys():
        return
    sizes = _lengths(columns["routed_experts"])
    routed = _lengths(columns["prompt_tokens"]) + _lengths(columns["response_tokens"]) - 1
    _refuse((sizes > 0) & (sizes % np.maximum(routed, 1) != 0), "routed_experts differ in number from token to token")


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


def _check_annotations(columns: dict[str, pa.Array]) -> None:
    if "status" in columns:
        _check_is_in(columns, "status", _STATUSES)
    for name in ("teacher_logprobs", "teacher_top_logprobs"):
        if name not in columns:
            continue
        logprobs = columns[name]
        _refuse_value(~np.isfinite(_numpy(logprobs.flatten())), f"a {name[:-1]} is not finite", logprobs)
        if "status" in columns:
            failed = _numpy(pc.not_equal(columns["status"], "ok"))
            _refuse(failed & (_lengths(logprobs) > 0), f"{name} are there, but status is not ok")
    if {"teacher_logprobs", "teacher_top_tokens", "teacher_top_logprobs"} <= columns.keys():
        num_tokens, num_top = _lengths(columns["teacher_logprobs"]), _lengths(columns["teacher_top_tokens"])
        uneven = (num_top != _lengths(columns["teacher_top_logprobs"])) | (num_top % np.maximum(num_tokens, 1) != 0)
        _refuse(uneven, "teacher_top_tokens differ in number from token to token, or from teacher_top_logprobs")
    if "reward" not in columns:
        return
    rewards = columns["reward"]
    if "status" in columns:
        ok = _numpy(pc.equal(columns["status"], "ok"))
        reason = "a reward is expected if and only if status is ok: a failure is not a reward of 0"
        _refuse(ok != _numpy(rewards.is_valid()), reason)
    _refuse(~np.isfinite(_numpy(rewards.fill_null(0.0))), "reward is not finite")


def _check_is_in(columns: dict[str, pa.Array], name: str, allowed: Sequence[str]) -> None:
    # Arrow imports pandas, if installed, for the first list that it converts. So no list at import.
    unknown = ~_numpy(pc.or_(pc.is_in(columns[name], value_set=pa.array(allowed)), pc.is_null(columns[name])))
    _refuse(unknown, f"{name} is none of {', '.join(allowed)}")


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
