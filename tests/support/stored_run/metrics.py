"""Metrics of the stages of a generated run at one step: the names that real stages use, with plausible values."""

import math
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from support.stored_run.groups import MAX_TOKENS, STALE, TRAINED, Rollouts

from millrace.rollouts.staleness import TOKENS_OF_STALENESS
from millrace.runtime.metrics import CPU_CORES, MEMORY_BYTES
from storage.schema import METRIC

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
"""How each stage spends a second, in seconds."""
_CORES = {"generate": 0.8, "train": 0.9}


def stage_time(stage: str, tokens: int) -> dict[str, float]:
    """How a stage spent its last second, and the tokens it has processed so far."""
    spent = {f"time/{what}/seconds": seconds for what, seconds in TIMES[stage].items()}
    spent |= {CPU_CORES: 0.1 + _CORES.get(stage, 0.0) * (1 + 0.1 * math.sin(tokens)), MEMORY_BYTES: 6e8}
    return spent if stage == "sync_weights" else {**spent, "total/tokens": float(tokens)}


def stage_seconds(stage: str, steps: int) -> dict[str, float]:
    """How a stage spent its time since the run began, as its status record tells it; a step takes a second."""
    waited = sum(seconds for what, seconds in TIMES[stage].items() if what.startswith("waiting for "))
    return {"idle": waited * steps, stage: (sum(TIMES[stage].values()) - waited) * steps}


def of_trainer(random: np.random.Generator, rollouts: Rollouts, step: int) -> dict[str, float]:
    """At the step that made version `step`; means are over the trajectories of the groups it trained."""
    in_step = (rollouts.of("step") == step) & (rollouts.outcome != STALE)
    staleness = rollouts.of("staleness")[in_step]
    spread = 0.01 * (1 + float(staleness.mean()))
    tokens_of_staleness = np.bincount(staleness, rollouts.tokens[in_step])
    return {
        "reward_mean": float(np.nanmean(rollouts.reward[in_step])),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "response_length_mean_tokens": float(rollouts.tokens[in_step].mean()),
        "buffered_rollouts": float(random.integers(0, 3) * np.count_nonzero(in_step)),
        "in_flight_rollouts": float(random.integers(0, 2) * np.count_nonzero(in_step)),
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
        "truncated_share": float((rollouts.tokens[in_step] == MAX_TOKENS).mean()),
        "reward_component/exact_match": float(np.nanmean(rollouts.reward[in_step])),
        "reward_component/extracted": 1.0 - 0.2 / (1 + step / 20),
        "zero_advantage_share": 0.3 + 0.2 * float(random.beta(2, 8)),
        "length_ratio": 1.0 + 0.01 * random.normal(),
        "reward_ratio": 1.0 + 0.02 * random.normal(),
        "entropy": 0.2 + 0.8 / (1 + step / 200),
        "tokens": float(rollouts.tokens[in_step & (rollouts.outcome == TRAINED)].sum()),
        **{f"{TOKENS_OF_STALENESS}{value}": float(count) for value, count in enumerate(tokens_of_staleness) if count},
    }


def of_generator(random: np.random.Generator) -> dict[str, float]:
    """When one version has reached one generator."""
    return {
        "pause_seconds": 0.01 + 0.01 * random.random(),
        "delivery/shm/seconds": 0.05 + 0.05 * random.random(),
        "probe_difference": 1e-6 * random.random(),
    }


def in_flight(random: np.random.Generator, policy_version: int, *, t: float) -> dict[str, object]:
    """Of a generator's status record at time `t`, unix seconds."""
    groups = int(random.integers(2, 8))
    return {
        "requests_in_flight": 2 * groups,
        "groups_in_flight": groups,
        "tokens_in_flight": 100 * groups,
        "oldest_version_in_flight": max(0, policy_version - int(random.integers(1, 4))),
        "t_oldest_in_flight": t - 10 * random.random(),
        "tokens_continued": 0,
        "tokens_discarded": 0,
    }


def of_sync_weights(random: np.random.Generator) -> dict[str, float]:
    """When one version has reached every generator."""
    return {
        "push_bytes": 1.6e6,
        "push_hash_seconds": 0.001,
        "push_offer_seconds": 0.002,
        "push_seconds": 0.05 + 0.05 * random.random(),
        "generator_pause_seconds_max": 0.02,
        "fallbacks": 0.0,
    }


def metric_rows(values: Mapping[str, float], *, t: float, incarnation: int, policy_version: int) -> pa.Table:
    """Rows of `METRIC` for one moment, unix seconds."""
    columns = {
        "t": [t] * len(values),
        "incarnation": [incarnation] * len(values),
        "policy_version": [policy_version] * len(values),
        "name": list(values),
        "value": list(values.values()),
    }
    return pa.Table.from_pydict(columns, schema=METRIC)
