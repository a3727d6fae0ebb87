"""A campaign's status, as `StatusReader.look` returns it."""

import copy
from typing import Any

STATUS: dict[str, Any] = {
    "run_id": "mine",
    "run_url": "/runs/mine",
    "state": "running",
    "cause": None,
    "steps": 7,
    "max_steps": 4000,
    "stop_at_step": 4000,
    "reward_mean": 0.4375,
    "wall_seconds": 754.0,
    "step_seconds": 1.5,
    "eta_seconds": 49.5,
    "eval": {"start": {"policy_version": 0, "accuracy": 0.25, "prompts": 512}},
    "evaluations": [],
    "best": None,
    "early_stop": None,
    "incidents": {"counts": {}, "restarts": {}, "latest": []},
    "decisions": {"count": 0, "latest": []},
    "doing": {"bootstrap-0": "stopped", "train-0": "train", "generate-0": "waiting for [room]"},
    "devices": {"generate-0": ["4", "5"]},
    "ready": {"bootstrap-0": False, "train-0": True, "generate-0": True},
    "policy_versions_used": 8,
    "staleness": {"histogram": {"0": 16, "2": 48}, "mean": 1.5, "max": 2, "bound": 4, "admission_only": False},
    "trained_to_taken": {"length": 0.9912, "reward": None},
    "zero_advantage_share": None,
    "curriculum": None,
    "sources": {},
    "ledger": {
        "generated": {"rollouts": 100, "tokens": 300},
        "trained": {"rollouts": 64, "tokens": 190},
        "masked": {"rollouts": 0, "tokens": 0},
        "buffered": {"rollouts": 20, "tokens": 60},
        "in_flight": {"rollouts": 8, "tokens": 25},
        "dropped": {"stale": {"rollouts": 8, "tokens": 25}},
        "generated_twice": {"tokens": 0},
    },
    "scores": {"rollouts": 92, "errors": 0},
    "services": {},
    "tokens": {"generate": 300, "score": 275, "train": 190},
    "seconds": {f"{idle}{stage}": 8.0 for stage in ("generate", "score", "train", "sync") for idle in ("", "idle_")},
    "weight_sync": {"transport": "shm", "count": 8, "p50_seconds": 0.0041, "bytes": 1000},
}


def status_with(**changes: Any) -> dict[str, Any]:
    """A copy of STATUS with these values replaced."""
    return {**copy.deepcopy(STATUS), **changes}
