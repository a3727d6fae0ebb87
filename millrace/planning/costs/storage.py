"""How many bytes a run stores, and how long its checkpoints take."""

from dataclasses import dataclass

import pyarrow as pa

from millrace.planning.costs.assumptions import Assumptions
from millrace.planning.costs.hardware import Hardware
from millrace.planning.costs.model_shape import BYTES, ModelShape
from millrace.planning.costs.training import TrainerSetup, trained_parameters
from storage.schema import CONSUMED, SCORE, TRAINER_LOGPROBS, TRAJECTORY

_PER_PROMPT_TOKEN = ("prompt_tokens",)
_PER_RESPONSE_TOKEN = ("response_tokens", "rollout_logprobs", "loss_mask", "trainer_logprobs")
_TEXT = 32
"""Bytes of a short text or list: ids, answers, spans."""
_DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBytes:
    """What a run writes. Nothing is compressed."""

    rollout: float
    """Trajectory, score and account of one rollout."""
    rollouts_per_day: float
    checkpoint: float
    checkpoints_per_day: float

    @property
    def per_day(self) -> float:
        """Of trajectories, and of checkpoints before older ones are removed."""
        return self.rollout * self.rollouts_per_day + self.checkpoint * self.checkpoints_per_day


def rollout_bytes(prompt_tokens: float, response_tokens: float, *, kept_tokens: float = 0.0) -> float:
    """Bytes of one rollout in all streams.

    `kept_tokens`: how many tokens truncated sampling could draw from, per response token; 0: nothing was truncated.
    """
    total = 0.0
    for schema in (TRAJECTORY, SCORE, CONSUMED, TRAINER_LOGPROBS):
        for field in schema:
            total += _field_bytes(field, prompt_tokens, response_tokens)
    return total + response_tokens * 4 * (kept_tokens + (kept_tokens > 0))


def checkpoint_bytes(shape: ModelShape, setup: TrainerSetup) -> float:
    """Trained weights and their two moments, in the weights' format."""
    return float(trained_parameters(shape, setup) * 3 * BYTES[setup.dtype])


def checkpoint_seconds(shape: ModelShape, setup: TrainerSetup, hardware: Hardware, assumptions: Assumptions) -> float:
    """How long the trainer stands still for a checkpoint: each rank copies its shards to the CPU's memory."""
    own = checkpoint_bytes(shape, setup) / setup.gpus
    return own / (hardware.host_copy * assumptions.host_copy_share)


def stored_bytes(
    rollout: float, *, rollouts_per_step: float, checkpoint: float, checkpoint_every: int, step_seconds: float
) -> StoredBytes:
    """Of a campaign with steps of so many seconds."""
    steps = _DAY / step_seconds
    return StoredBytes(
        rollout=rollout,
        rollouts_per_day=rollouts_per_step * steps,
        checkpoint=checkpoint,
        checkpoints_per_day=steps / checkpoint_every,
    )


def _field_bytes(field: pa.Field, prompt_tokens: float, response_tokens: float) -> float:
    kind = field.type
    if field.name in (*_PER_PROMPT_TOKEN, *_PER_RESPONSE_TOKEN):
        tokens = prompt_tokens if field.name in _PER_PROMPT_TOKEN else response_tokens
        return 4 + tokens * float(kind.value_type.bit_width) / 8
    if pa.types.is_string(kind) or pa.types.is_list(kind):
        return 4.0 + _TEXT
    return float(kind.bit_width) / 8
