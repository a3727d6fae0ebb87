"""The columns of every stream, and of the answers of an evaluation.

Each field has the metadata `doc`: unit, shape, whose policy. Columns are fixed and flat: one value, or one list of
numbers, per row. P, R and M are the numbers of prompt tokens, response tokens and messages of the row.
"""

import pyarrow as pa

SCHEMA_VERSION = 3
"""Written into each commit record. Parts of another version are refused."""


def column(name: str, dtype: pa.DataType, doc: str, *, nullable: bool = False) -> pa.Field:
    """A documented field."""
    return pa.field(name, dtype, nullable=nullable, metadata={"doc": doc})


_INTS, _LONGS = pa.list_(pa.int32()), pa.list_(pa.int64())
_BYTES, _FLOATS, _STRINGS = pa.list_(pa.uint8()), pa.list_(pa.float32()), pa.list_(pa.string())
_TIMES = pa.list_(pa.float64())

_DRAWN = (
    column("kept_tokens", _INTS, "token ids that truncated sampling (top_p) could draw from; empty if not truncated"),
    column("kept_counts", _INTS, "[R] how many of kept_tokens each response token has; empty if not truncated"),
    column(
        "routed_experts",
        pa.list_(pa.uint16()),
        "[P + R - 1, layers with experts, experts per token] flat: experts of each token but the last; may be empty",
    ),
)
"""How each token was drawn: the columns that finished and unfinished responses share."""

TRAJECTORY: pa.Schema = pa.schema(
    [
        column("row_id", pa.int64(), "index of the row in its stream, from 0 without gaps"),
        column("group_id", pa.int64(), "group of the trajectories that answer the same prompt"),
        column("source", pa.string(), "name of the source in the config that the group belongs to"),
        column("prompt_id", pa.string(), "id of the prompt in its source's prompts"),
        column("sample_index", pa.int32(), "index of the trajectory in its group, from 0"),
        column("prompt_tokens", _INTS, "[P] token ids of the prompt"),
        column(
            "response_tokens", _INTS, "[R] token ids with end tokens, of the policy or (loss_mask 0) its environment"
        ),
        column(
            "rollout_logprobs", _FLOATS, "[R] log-probability when sampled, after temperature and top-p, nats; or 0"
        ),
        column("span_versions", _LONGS, "[spans] policy version that sampled each span of tokens"),
        column("span_starts", _INTS, "[spans] index of each span's first token in the response"),
        column("min_policy_version", pa.int64(), "oldest policy version that sampled a token of the response"),
        column("max_policy_version", pa.int64(), "newest policy version that sampled a token of the response"),
        column("incarnation", pa.int32(), "incarnation of the trainer that made the sampling policy's weights"),
        column("loss_mask", _BYTES, "[R] 1 if the token takes part in the loss, else 0"),
        column("finish_reason", pa.string(), "stop: by the policy or its environment; length: by a limit"),
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
            "t_environment",
            _TIMES,
            "[2 × turns] when its environment began and ended each answer, unix seconds; or empty",
        ),
        column(
            "meta", pa.string(), "JSON object: the prompt's answer and source, maybe environment_error, demonstration"
        ),
        column("message_roles", _STRINGS, "[M] role of each message of the conversation; empty for plain text"),
        column("message_starts", _INTS, "[M] first token of each message with its marks, in prompt + response"),
        *_DRAWN,
    ]
)


def _of_trajectory(*names: str) -> list[pa.Field]:
    return [TRAJECTORY.field(name) for name in names]


UNFINISHED: pa.Schema = pa.schema(
    [
        *_of_trajectory("group_id", "sample_index", "response_tokens", "rollout_logprobs", "loss_mask"),
        *_of_trajectory("span_versions", "span_starts", "min_policy_version", "max_policy_version"),
        column("incarnation", pa.int32(), "incarnation of the trainer that made the newest of these weights"),
        column("finish_reason", pa.string(), "as of a trajectory; null if the response is unfinished", nullable=True),
        column("environment_error", pa.string(), "exception of the environment that ended it", nullable=True),
        *_of_trajectory("t_admitted", "t_started"),
        column("t_finished", pa.float64(), "when its last token was sampled, unix seconds; 0 if it is unfinished"),
        *_DRAWN,
    ]
)
"""A part is all that one generator had in flight at one moment; only the newest part counts."""

SCORE: pa.Schema = pa.schema(
    [
        column("row_id", pa.int64(), "row_id of the scored trajectory in its stream"),
        column("reward", pa.float32(), "reward of the whole response, dimensionless; null unless ok", nullable=True),
        column("components", pa.string(), "JSON object: the components of the reward by name"),
        column("status", pa.string(), "outcome of the verification: ok, timeout or error; elsewhere: by other scorers"),
        column("error", pa.string(), "one sentence on what failed; null if ok", nullable=True),
        column("verifier_version", pa.string(), "version of the code that scored the row"),
        column("seconds", pa.float32(), "duration of the verification, seconds"),
        column("t_scored", pa.float64(), "when the verification ended, unix seconds; 0 if it is elsewhere"),
        column(
            "exchange",
            pa.string(),
            "JSON object: what endpoints were asked and answered, by reward; null if none was asked for this row",
            nullable=True,
        ),
    ]
)

TEACHER: pa.Schema = pa.schema(
    [
        column("row_id", pa.int64(), "row_id of the trajectory in its stream"),
        column(
            "teacher_logprobs", _FLOATS, "[R] log-probability under the teacher, as of the trainer; empty unless ok"
        ),
        column(
            "teacher_top_tokens",
            _INTS,
            "[R, k] flat: the teacher's likeliest tokens at each; empty unless stored",
        ),
        column("teacher_top_logprobs", _FLOATS, "[R, k] flat: their log-probabilities under the teacher"),
        column("status", pa.string(), "ok or error; elsewhere: by another teacher, or by none"),
        column("error", pa.string(), "one sentence on what failed; null unless error", nullable=True),
        column("teacher_version", pa.string(), "hash of the teacher's model folder"),
        column("seconds", pa.float32(), "share of the part's duration, by tokens, seconds"),
    ]
)

ANNOTATIONS: dict[str, pa.Schema] = {"scores": SCORE, "teachers": TEACHER}
"""The columns of annotations by the first part of their pool's name."""

CONSUMED: pa.Schema = pa.schema(
    [
        column("t", pa.float64(), "when the step that consumed it was done, unix seconds"),
        column("incarnation", pa.int32(), "incarnation of the trainer that consumed it"),
        column("policy_version", pa.int64(), "policy version made by the step that consumed it"),
        column("generator", pa.int32(), "number of the generator that made the trajectory"),
        column("trajectory_row_id", pa.int64(), "row_id of the trajectory in its generator's stream"),
        column("group_id", pa.int64(), "group of the trajectory; -1 if its part can't be read"),
        column("source", pa.string(), "name of the source in the config; empty if the part can't be read"),
        column("prompt_id", pa.string(), "id of the prompt in its source's prompts; empty if the part can't be read"),
        column("sample_index", pa.int32(), "index of the trajectory in its group, from 0"),
        column("outcome", pa.string(), "trained, stale, error, corrupt, rolled_back, zero_advantage or truncated"),
        column("staleness", pa.int32(), "trainer's policy version at admission minus the group's oldest unmasked one"),
        column("staleness_in_flight", pa.int32(), "part of the staleness that arose during sampling, not in queues"),
        column("min_policy_version", pa.int64(), "oldest policy version that sampled a token of the response"),
        column("max_policy_version", pa.int64(), "newest policy version that sampled a token of the response"),
        column("tokens", pa.int32(), "number of response tokens; an equal share of the part's if that can't be read"),
        column("reward", pa.float32(), "reward of the whole response; null if the verifier failed", nullable=True),
        column("advantage", pa.float32(), "advantage of its tokens; null unless trained", nullable=True),
        column("masked_tokens", pa.int32(), "response tokens masked because they were too old; 0 if dropped"),
    ]
)

TRAINER_LOGPROBS: pa.Schema = pa.schema(
    [
        column("incarnation", pa.int32(), "incarnation of the trainer"),
        column("policy_version", pa.int64(), "policy version made by the step that trained on it"),
        column("generator", pa.int32(), "number of the generator that made the trajectory"),
        column("trajectory_row_id", pa.int64(), "row_id of the trajectory in its generator's stream"),
        column("trainer_logprobs", _FLOATS, "[R] log-probability under the policy before the step, nats"),
        column("trainer_entropies", _FLOATS, "[R] entropy of its next token at the rollout's temperature, nats"),
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


def check_columns(actual: pa.Schema, schema: pa.Schema) -> None:
    """Raises ValueError unless `actual` has exactly the columns of `schema`: names, order, types."""
    if actual.equals(schema):
        # The usual case; the check below costs as much as verifying a megabyte.
        return
    if actual.names != schema.names:
        raise ValueError(f"columns are {actual.names}, expected {schema.names}")
    for field in schema:
        if actual.field(field.name).type != field.type:
            raise ValueError(f"column {field.name} is {actual.field(field.name).type}, expected {field.type}")


def in_order(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with the columns of `schema` in their order, with their documentation."""
    return pa.Table.from_arrays([table[name] for name in schema.names], schema=schema)


ANSWERS: pa.Schema = pa.schema(
    [
        column("set", pa.string(), "name of the evaluation set, as in the result of the evaluation"),
        column("prompt_id", pa.string(), "id of the prompt in its set"),
        column("prompt", pa.string(), "the question, without template"),
        column("expected", pa.string(), "reference answer; empty if the prompt has none"),
        column("responses", _STRINGS, "[1 + samples] text of the greedy response, then of each sampled one"),
        column("rewards", pa.list_(pa.float64()), "[1 + samples] reward of each response; null if its reward failed"),
    ]
)
"""The answers of a policy version to an evaluation, one row per prompt: `answers/<version>.parquet`."""
