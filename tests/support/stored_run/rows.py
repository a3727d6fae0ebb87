"""Groups of a made-up run, and their rows in each stream. No model samples them; the invariants of a real run hold.

Weights are never newer than the trainer's. No trained group exceeds the staleness bound; those that do are dropped.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.stored import DEFAULT_SOURCE
from storage.schema import CONSUMED, SCORE, TRAINER_LOGPROBS, TRAJECTORY

VOCAB_SIZE = 128
MIN_TOKENS, MAX_TOKENS = 4, 200
_SECONDS_IN_FLIGHT, _SECONDS_IN_QUEUE = 0.5, 0.4
_EMPTY = ("t_environment", "message_roles", "message_starts", "kept_tokens", "kept_counts", "routed_experts")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a run."""

    steps: int
    groups_per_step: int = 4
    group_size: int = 4
    generators: int = 2
    scorers: int = 1
    max_staleness: int = 4
    steps_per_part: int = 1
    prompts: int = 2500
    """Different prompts; each is used once per epoch."""
    seed: int = 0
    stale_share: float = 0.02
    error_share: float = 0.01
    """Share of groups in which one member has no reward."""
    sources: tuple[str, ...] = (DEFAULT_SOURCE,)
    """Of a mixture: each has the same prompts, and as many groups as the others."""


@dataclass(frozen=True, kw_only=True)
class MadeRollout:
    """A rollout, and its outcome at the trainer."""

    group_id: int
    source: str
    sample_index: int
    generator: int
    row_id: int
    prompt: int
    step: int
    """Policy version made by the step that takes its group."""
    min_version: int
    """The same for the whole group."""
    max_version: int
    group_max_version: int
    logprobs: npt.NDArray[np.float32]
    reward: float | None
    advantage: float | None
    outcome: str
    t_step: float

    @property
    def summands(self) -> tuple[int, int]:
        return self.prompt % 50, self.prompt // 50 % 50

    @property
    def prompt_id(self) -> str:
        left, right = self.summands
        return f"{left}+{right}="

    @property
    def tokens(self) -> int:
        return len(self.logprobs)

    @property
    def staleness(self) -> int:
        return self.step - 1 - self.min_version


def make_group(
    random: np.random.Generator, shape: Shape, *, group_id: int, step: int, stale: bool, first_row: int, t_step: float
) -> list[MadeRollout]:
    """A group that the step to version `step` takes; `first_row` is the next row_id of its generator."""
    generator, size = group_id % shape.generators, shape.group_size
    usual = shape.max_staleness * (0.5 + 0.4 * np.sin(step / 40 + generator)) + random.normal(0, 0.6)
    staleness = (
        shape.max_staleness + 1 if stale else int(np.clip(np.rint(usual), 0, min(shape.max_staleness, step - 1)))
    )
    min_version = step - 1 - staleness
    in_flight = min(staleness, int(random.integers(0, 3)))
    # The first member was in flight the longest.
    max_versions = [min_version + in_flight, *(min_version + random.integers(0, in_flight + 1, size - 1)).tolist()]
    median = np.log(20 + 20 * min(1, step / 1000)) + 0.4 * stale
    lengths = np.clip(np.exp(random.normal(median, 0.6, size)), MIN_TOKENS, MAX_TOKENS).astype(int).tolist()
    success = 0.3 + 0.5 * (1 - np.exp(-step / 300))
    rewards: list[float | None] = (random.random(size) < success).astype(float).tolist()
    if random.random() < shape.error_share:
        rewards[1] = None
    mean = np.mean([reward for reward in rewards if reward is not None])
    outcomes = ["stale" if stale else "error" if reward is None else "trained" for reward in rewards]
    return [
        MadeRollout(
            group_id=group_id,
            source=shape.sources[group_id // shape.generators % len(shape.sources)],
            sample_index=i,
            generator=generator,
            row_id=first_row + i,
            prompt=group_id % shape.prompts,
            step=step,
            min_version=min_version,
            max_version=max_versions[i],
            group_max_version=max_versions[0],
            logprobs=-random.standard_exponential(lengths[i], dtype=np.float32),
            reward=reward,
            advantage=float(reward - mean) if outcomes[i] == "trained" and reward is not None else None,
            outcome=outcomes[i],
            t_step=t_step,
        )
        for i, reward in enumerate(rewards)
    ]


def trajectory_rows(rollouts: list[MadeRollout], *, incarnation: int, epoch: int) -> pa.Table:
    return pa.Table.from_pylist([_trajectory(rollout, incarnation, epoch) for rollout in rollouts], schema=TRAJECTORY)


def _trajectory(rollout: MadeRollout, incarnation: int, epoch: int) -> dict[str, Any]:
    (left, right), tokens = rollout.summands, rollout.tokens
    prompt = rollout.prompt_id
    versions = list(range(rollout.min_version, rollout.max_version + 1))
    finished = rollout.t_step - _SECONDS_IN_QUEUE
    return {
        "row_id": rollout.row_id,
        "group_id": rollout.group_id,
        "source": rollout.source,
        "prompt_id": prompt,
        "sample_index": rollout.sample_index,
        "prompt_tokens": [ord(letter) for letter in prompt],
        "response_tokens": [ord("0") + t % 10 for t in range(tokens)],
        "rollout_logprobs": rollout.logprobs,
        "span_versions": versions,
        "span_starts": [tokens * nth // len(versions) for nth in range(len(versions))],
        "min_policy_version": rollout.min_version,
        "max_policy_version": rollout.max_version,
        "incarnation": incarnation,
        "loss_mask": [1] * tokens,
        "finish_reason": "length" if tokens == MAX_TOKENS else "stop",
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": MAX_TOKENS,
        "generator": rollout.generator,
        "epoch": epoch,
        "seed": rollout.row_id,
        "t_admitted": finished - _SECONDS_IN_FLIGHT - 0.1,
        "t_started": finished - _SECONDS_IN_FLIGHT,
        "t_finished": finished,
        "meta": json.dumps({"prompt": prompt, "answer": str(left + right), "source": "arithmetic"}),
        **{name: [] for name in _EMPTY},
    }


def score_rows(rollouts: list[MadeRollout]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "row_id": rollout.row_id,
                "reward": rollout.reward,
                "components": '{"exact_match": 1.0}',
                "status": "timeout" if rollout.reward is None else "ok",
                "error": "took longer than 1 s" if rollout.reward is None else None,
                "verifier_version": "exact_match-1",
                "seconds": 1e-5,
                "t_scored": rollout.t_step - _SECONDS_IN_QUEUE / 2,
            }
            for rollout in rollouts
        ],
        schema=SCORE,
    )


def _consumed_key(rollout: MadeRollout, incarnation: int) -> dict[str, Any]:
    return {
        "incarnation": incarnation,
        "policy_version": rollout.step,
        "generator": rollout.generator,
        "trajectory_row_id": rollout.row_id,
    }


def consumed_rows(rollouts: list[MadeRollout], incarnation: int) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                **_consumed_key(rollout, incarnation),
                "t": rollout.t_step,
                "group_id": rollout.group_id,
                "source": rollout.source,
                "prompt_id": rollout.prompt_id,
                "sample_index": rollout.sample_index,
                "outcome": rollout.outcome,
                "staleness": rollout.staleness,
                "staleness_in_flight": rollout.group_max_version - rollout.min_version,
                "min_policy_version": rollout.min_version,
                "max_policy_version": rollout.max_version,
                "tokens": rollout.tokens,
                "reward": rollout.reward,
                "advantage": rollout.advantage,
                "masked_tokens": 0,
            }
            for rollout in rollouts
        ],
        schema=CONSUMED,
    )


def logprob_rows(random: np.random.Generator, trained: list[MadeRollout], incarnation: int) -> pa.Table:
    """log π of a policy slightly ahead of the one that sampled."""
    rows = []
    for rollout in trained:
        drift = random.normal(0, 0.02, rollout.tokens) * (1 + rollout.staleness)
        logprobs = np.minimum(0, rollout.logprobs + drift)
        # The entropy is the mean of −log π.
        values = {"trainer_logprobs": logprobs, "trainer_entropies": np.full(rollout.tokens, -logprobs.mean())}
        rows.append({**_consumed_key(rollout, incarnation), **values})
    return pa.Table.from_pylist(rows, schema=TRAINER_LOGPROBS)
