"""The results of a replay. The stages verify and compare write their own; the others are made here, at the end."""

from typing import Any

from millrace.replay.rescore import compare_scores
from millrace.replay.results import read_results, read_spec, write_result
from millrace.replay.source_run import SourceRun
from millrace.runs.history import read_steps, throughput
from millrace.runs.record import latest_attempt
from millrace.runs.status import StatusReader
from storage.progress import read_status
from storage.stores.base import Store
from storage.stores.factory import open_store


def collect(store: Store) -> dict[str, Any]:
    """Completes the results of the replay in `store`, and returns all of them by name."""
    spec = read_spec(store)
    assert spec is not None
    sources = [open_store(url) for url in spec.sources]
    if spec.rescore:
        scoring = latest_attempt(store).config["scoring"]
        rescored, changed = compare_scores(SourceRun(sources[0]), store, scoring["reward"], scoring["replicas"])
        write_result(store, "rescored", rescored, table=("changed", changed))
    if spec.job == "train":
        write_result(store, "trained", {"runs": [training_summary(run) for run in (*sources, store)]})
    return read_results(store)


def training_summary(store: Store) -> dict[str, Any]:
    """How well and how fast the run in `store` trained. Raises RunMissing, and StreamCorrupt for damage.

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
