"""Metrics and status records of a made-up run's stages at one step: real names, plausible values."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from support.stored_run.rows import MAX_TOKENS, MadeRollout

from millrace.rollouts.ledger import Account, Amount
from millrace.rollouts.staleness import TOKENS_OF_STALENESS
from millrace.runtime.usage import CPU_CORES, GPU_BUSY_SHARE, GPU_MEMORY_BYTES, MEMORY_BYTES
from storage.schema import METRIC

STEP_SECONDS = 1.0
TIMES = {
    "generate": {
        "generate": 0.7,
        "commit": 0.05,
        "update_weights": 0.02,
        "waiting for weights": 0.03,
        "waiting for room under max_staleness": 0.2,
    },
    "score": {"score": 0.1, "commit": 0.05, "waiting for trajectories": 0.85},
    "train": {"train": 0.8, "handover": 0.03, "loading": 0.05, "waiting for scored groups": 0.12},
    "sync_weights": {"sync": 0.02, "waiting for a new policy version": 0.98},
}
"""How each stage spends a step, in seconds."""
_CORES = {"generate": 0.8, "train": 0.9}


def stage_metrics(random: np.random.Generator, stage: str, tokens: int) -> dict[str, float]:
    """A stage's times of the last second, its tokens so far, and its metrics of weight sync."""
    values = {f"time/{kind}/seconds": seconds for kind, seconds in TIMES[stage].items()}
    values |= {CPU_CORES: 0.1 + _CORES.get(stage, 0.0) * (1 + 0.1 * math.sin(tokens)), MEMORY_BYTES: 6e8}
    if stage in _CORES:
        values |= {GPU_BUSY_SHARE: 0.7 + 0.2 * math.sin(tokens), GPU_MEMORY_BYTES: 40e9}
    if stage == "sync_weights":
        push = {"push_bytes": 1.6e6, "push_hash_seconds": 0.001, "push_offer_seconds": 0.002, "fallbacks": 0.0}
        return values | push | {"push_seconds": 0.05 + 0.05 * random.random(), "generator_pause_seconds_max": 0.02}
    if stage == "generate":
        values |= {
            "pause_seconds": 0.01 + 0.01 * random.random(),
            "delivery/shm/seconds": 0.05 + 0.05 * random.random(),
            "probe_difference": 1e-6 * random.random(),
        }
    return {**values, "total/tokens": float(tokens)}


def trainer_metrics(random: np.random.Generator, batch: Sequence[MadeRollout], step: int) -> dict[str, float]:
    """Metrics of the step that made version `step` of the groups `batch`."""
    staleness = [rollout.staleness for rollout in batch]
    lengths = np.array([rollout.tokens for rollout in batch])
    rewards = [rollout.reward for rollout in batch if rollout.reward is not None]
    tokens_of_staleness: Counter[int] = Counter()
    for rollout in batch:
        tokens_of_staleness[rollout.staleness] += rollout.tokens
    spread = 0.01 * (1 + float(np.mean(staleness)))
    return {
        "reward_mean": float(np.mean(rewards)),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": float(max(staleness)),
        "response_length_mean_tokens": float(lengths.mean()),
        "buffered_rollouts": float(random.integers(0, 3) * len(batch)),
        "in_flight_rollouts": float(random.integers(0, 2) * len(batch)),
        "train_seconds": 0.25 + 0.05 * random.random(),
        "loss": -0.1 + 0.01 * random.normal(),
        "grad_norm": 0.3 + 0.05 * random.random(),
        "importance_ratio_mean": 1.0 + 0.1 * spread * random.normal(),
        "importance_ratio_p05": 1.0 - 2 * spread,
        "importance_ratio_p50": 1.0,
        "importance_ratio_p95": 1.0 + 2 * spread,
        "importance_ratio_max": 1.0 + 10 * spread,
        "clip_fraction": 0.001 * random.random(),
        "effective_sample_size": 1.0 - spread,
        "mismatch_kl": spread**2,
        "overtaken_groups_mean": float(random.gamma(1.0, 2.0)),
        "overtaken_groups_max": float(random.integers(4, 20)),
        "masked_token_share": 0.02 * float(random.beta(2, 8)),
        "truncated_share": float((lengths == MAX_TOKENS).mean()),
        "reward_component/exact_match": float(np.mean(rewards)),
        "reward_component/extracted": 1.0 - 0.2 / (1 + step / 20),
        "zero_advantage_share": 0.3 + 0.2 * float(random.beta(2, 8)),
        "length_ratio": 1.0 + 0.01 * random.normal(),
        "reward_ratio": 1.0 + 0.02 * random.normal(),
        "entropy": 0.2 + 0.8 / (1 + step / 200),
        "tokens": float(sum(rollout.tokens for rollout in batch if rollout.outcome == "trained")),
        **{f"{TOKENS_OF_STALENESS}{value}": float(count) for value, count in sorted(tokens_of_staleness.items())},
    }


def source_metrics(batch: Sequence[MadeRollout], taken: Sequence[MadeRollout], source: str) -> dict[str, float]:
    """Metrics of a source of a mixture: of its rollouts in the step's `batch`, and among those `taken` for it."""
    chosen = [rollout for rollout in batch if rollout.source == source]
    num_taken = len({rollout.group_id for rollout in taken if rollout.source == source})
    num_trained = len({rollout.group_id for rollout in chosen})
    values = {"groups_trained": float(num_trained), "groups_dropped": float(num_taken - num_trained)}
    if chosen:
        rewards = [rollout.reward for rollout in chosen if rollout.reward is not None]
        values |= {
            "reward_mean": float(np.mean(rewards)),
            "staleness_mean": float(np.mean([rollout.staleness for rollout in chosen])),
            "response_length_mean_tokens": float(np.mean([rollout.tokens for rollout in chosen])),
            "truncated_share": float(np.mean([rollout.tokens == MAX_TOKENS for rollout in chosen])),
            "response_seconds_mean": 0.5,
            "score_seconds_mean": 0.01,
            "zero_advantage_share": float(len(set(rewards)) == 1),
            "length_ratio": 1.0,
        }
    return {f"{name}/{source}": value for name, value in values.items()}


def metric_rows(values: Mapping[str, float], *, t: float, incarnation: int, policy_version: int) -> pa.Table:
    """Rows of METRIC for one moment, unix seconds."""
    stamp = {"t": t, "incarnation": incarnation, "policy_version": policy_version}
    rows = [{**stamp, "name": name, "value": value} for name, value in values.items()]
    return pa.Table.from_pylist(rows, schema=METRIC)


def status_record(stage: str, *, doing: str, steps: int, incarnation: int, account: Account) -> dict[str, object]:
    """The status record that a replica writes now, after `steps` steps."""
    waited = sum(seconds for kind, seconds in TIMES[stage].items() if kind.startswith("waiting for "))
    return {
        "attempt": 0,
        "doing": doing,
        "pid": 1,
        "t": time.time(),
        "policy_version": steps,
        "incarnation": incarnation,
        "seconds": {"idle": waited * steps, stage: (sum(TIMES[stage].values()) - waited) * steps},
        "tokens": account.taken().tokens,
        "rollouts": account.taken().rollouts,
    }


def generator_status(random: np.random.Generator, policy_version: int) -> dict[str, object]:
    """The fields that only a generator's record has."""
    groups = int(random.integers(2, 8))
    return {
        "requests_in_flight": 2 * groups,
        "groups_in_flight": groups,
        "tokens_in_flight": 100 * groups,
        "oldest_version_in_flight": max(0, policy_version - int(random.integers(1, 4))),
        "t_oldest_in_flight": time.time() - 10 * random.random(),
        "tokens_continued": 0,
        "tokens_discarded": 0,
    }


def trainer_status(
    account: Account, consumed: Sequence[Amount], step_metrics: Mapping[str, float], *, steps: int, max_steps: int
) -> dict[str, object]:
    """The fields that only the trainer's record has."""
    trained = account.trained
    return {
        "tokens": trained.tokens,
        "rollouts": trained.rollouts,
        "groups_dropped": account.groups_dropped,
        "max_steps": max_steps,
        "step_seconds": STEP_SECONDS,
        "tokens_per_second": trained.tokens / (steps * STEP_SECONDS) if steps else 0.0,
        "account": account.to_json(),
        "consumed": [amount.to_json() for amount in consumed],
        "reward_mean": step_metrics.get("reward_mean"),
        "step": dict(step_metrics) or None,
    }
