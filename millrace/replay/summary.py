"""How well and how fast a run trained: the numbers by which a replay is compared with its sources."""

from typing import Any

from millrace.runs.history import read_steps, throughput
from millrace.runs.status import StatusReader
from storage.progress import read_status
from storage.stores.base import Store


def training_summary(store: Store) -> dict[str, Any]:
    """Of the run in `store`, from its first step to its last. Raises RunMissing, and StreamCorrupt for damage.

    `steps` is the last policy version, `accuracy` the held-out greedy accuracy of the newest evaluated version above 0
    (None if none was evaluated). `tokens_per_second` counts response tokens, waiting included (None with fewer than two
    steps). `seconds` is the trainer's time by activity, `train_share` the share of it spent in optimizer steps.
    """
    status = StatusReader(store).look()
    steps = read_steps(store)
    seconds: dict[str, float] = dict(read_status(store, "train", 0).get("seconds", {}))
    total = sum(seconds.values())
    end = status["eval"].get("end")
    return {
        "run_id": status["run_id"],
        "steps": steps[-1].policy_version if steps else 0,
        "accuracy": None if end is None else end["accuracy"],
        "tokens_per_second": next((value for _, value in throughput(steps, 1)), None),
        "train_share": seconds.get("train", 0.0) / total if total else None,
        "seconds": seconds,
    }
