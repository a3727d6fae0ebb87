"""The status of a run, from its store alone: during or after the run, from any machine with access to the store.

commit logs ─► generated, scored, versions used ┐
status records ► trained, dropped, staleness,   ├─► status: the JSON of `millrace status` and of summary.json
                 seconds, process ids           │
metrics of sync_weights ─► pushes               │
evaluations ────────────────────────────────────┘
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.evaluation.early_stop import read_early_stop
from millrace.evaluation.results import Result, ResultsReader, best_result, measures_by_set
from millrace.rollouts.ledger import Account, Amount, Ledger, amount_committed, balance
from millrace.runs.record import how_attempt_ended, latest_attempt, read_run
from storage import layout
from storage.progress import read_progress
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.log import LogReader
from storage.streams.stream import StreamReader

STAGES = ("generate", "score", "train", "sync_weights")
_SILENT_SECONDS = 20.0
"""A run counts as stopped if no stage has written a status record for this long."""


class StatusReader:
    """Reads a run's status repeatedly; each `look` reads only what is new. Raises RunMissing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run_id: str = read_run(store)["run_id"]
        self._attempt = latest_attempt(store)
        config = self._attempt.config
        generators, scorers = config["generation"]["replicas"], config["scoring"]["replicas"]
        reward = config["scoring"]["reward"]
        self._trajectories = [LogReader(store, layout.trajectories(g)) for g in range(generators)]
        # A replay scores another run's trajectories, so its scores are not part of its own ledger.
        scored_here = not store.exists(layout.REPLAY)
        self._scores = [
            LogReader.at_head(store, layout.scores(reward, g, s, scorers))
            for g in range(generators)
            for s in range(scorers)
            if scored_here
        ]
        self._results = ResultsReader(store)
        self._versions_used: set[int] = set()
        self._pushes = StreamReader(store, layout.metrics("sync_weights", 0), METRIC)
        self._push_values: dict[str, list[float]] = {"push_seconds": [], "push_bytes": []}

    def look(self) -> dict[str, Any]:
        """The current status, plain JSON. Raises StreamCorrupt or LedgerMismatch if the run is damaged."""
        # The run may have been resumed since the last look.
        self._attempt = latest_attempt(self._store)
        records = read_progress(self._store)
        trainer = records.get("train-0", {})
        account = Account.from_json(trainer["account"]) if "account" in trainer else Account()
        consumed = [Amount.from_json(amount) for amount in trainer.get("consumed", [])]
        # Read after the trainer's status record, so that everything it counts is committed.
        ledger = self._ledger(account, consumed)
        self._read_pushes()
        results = self._results.read()
        early_stop = read_early_stop(self._store, self._attempt.number)
        return {
            "run_id": self._run_id,
            "run_url": self._store.url,
            "attempt": self._attempt.number,
            "state": run_state(how_attempt_ended(self._store, self._attempt.number), self._attempt.t_started, records),
            "steps": trainer.get("policy_version", 0),
            "max_steps": self._attempt.config["training"]["max_steps"],
            "stop_at_step": self._attempt.stop_at_step,
            "wall_seconds": self._wall_seconds(records),
            "reward_mean": trainer.get("reward_mean"),
            "eval": _start_and_end(results),
            "evaluations": [_in_short(result) for result in results],
            "best": None if (best := best_result(results)) is None else _in_short(best),
            "early_stop": None if early_stop is None else early_stop.sentence,
            "stage_pids": {name: record["pid"] for name, record in records.items() if _stage(name) in STAGES},
            "doing": {name: record["doing"] for name, record in records.items()},
            "policy_versions_used": len(self._versions_used),
            "staleness": {**staleness_trained(account), "bound": self._attempt.max_staleness},
            "trained_to_taken": {"length": trainer.get("length_ratio"), "reward": trainer.get("reward_ratio")},
            "zero_advantage_share": trainer.get("zero_advantage_share"),
            "curriculum": _curriculum(records),
            "ledger": {**ledger.to_json(), "generated_twice": _generated_twice(ledger, records)},
            "seconds": _seconds(records),
            "tokens": _tokens(records),
            "weight_sync": self._weight_sync(),
        }

    def _ledger(self, account: Account, consumed: list[Amount]) -> Ledger:
        # Scores first, because their trajectories are already committed.
        scored = amount_committed(self._scores)
        for reader in self._trajectories:
            while (record := reader.next()) is not None:
                if record.kind == "data":
                    self._versions_used.update((record.min_policy_version, record.max_policy_version))
        return balance(
            generated=amount_committed(self._trajectories), scored=scored, consumed=consumed, account=account
        )

    def _read_pushes(self) -> None:
        # Damaged parts are skipped; `millrace fsck` lists them.
        for part in self._pushes.readable():
            names, values = part.table["name"].to_pylist(), part.table["value"].to_pylist()
            for name, value in zip(names, values, strict=True):
                if name in self._push_values:
                    self._push_values[name].append(value)

    def _weight_sync(self) -> dict[str, Any]:
        seconds = self._push_values["push_seconds"]
        return {
            "transport": self._attempt.config["weights"]["transport"],
            "count": len(seconds),
            "p50_seconds": statistics.median(seconds) if seconds else None,
            "bytes": int(sum(self._push_values["push_bytes"])),
        }

    def _wall_seconds(self, records: dict[str, dict[str, Any]]) -> float:
        """Duration of this attempt until its last status record."""
        newest = max((record["t"] for record in records.values()), default=self._attempt.t_started)
        return max(0.0, newest - self._attempt.t_started)


def _start_and_end(results: Sequence[Result]) -> dict[str, Result]:
    """The results of version 0 and of the latest version, as far as they exist."""
    found = {}
    if results and results[0]["policy_version"] == 0:
        found["start"] = results[0]
    if results and results[-1]["policy_version"] > 0:
        found["end"] = results[-1]
    return found


def _in_short(result: Result) -> dict[str, Any]:
    """A result's version, and the accuracy of each set."""
    return {
        "policy_version": result["policy_version"],
        "accuracy": {name: one["accuracy"] for name, one in measures_by_set(result).items()},
        "interval": result.get("accuracy_interval"),
        "prompts": result["prompts"],
    }


def _stage(name: str) -> str:
    return name.rpartition("-")[0]


def run_state(ended: str | None, t_started: float, records: Mapping[str, Mapping[str, Any]]) -> str:
    """The state of an attempt that started at `t_started` (unix seconds): `finished`, `stopped` or `running`.

    `ended` is the state that its controller recorded at its end, if any; `records` are its stages' status records.
    """
    if ended:
        return ended
    newest = max((record["t"] for record in records.values()), default=t_started)
    return "running" if time.time() - newest < _SILENT_SECONDS else "stopped"


def staleness_trained(account: Account) -> dict[str, Any]:
    """Staleness of the trained trajectories, policy versions: histogram, mean and maximum."""
    histogram = account.staleness
    total = histogram.total()
    return {
        "histogram": {str(staleness): count for staleness, count in sorted(histogram.items())},
        "mean": sum(staleness * count for staleness, count in histogram.items()) / total if total else None,
        "max": max(histogram, default=None),
    }


def _seconds(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Busy and idle time of each stage, summed over its replicas; `sync` is short for sync_weights."""
    totals: dict[str, float] = {}
    for stage in STAGES:
        short = "sync" if stage == "sync_weights" else stage
        replicas = [record["seconds"] for name, record in records.items() if _stage(name) == stage]
        totals[short] = sum(s for seconds in replicas for what, s in seconds.items() if what != "idle")
        totals[f"idle_{short}"] = sum(seconds.get("idle", 0.0) for seconds in replicas)
    return totals


def _curriculum(records: dict[str, dict[str, Any]]) -> dict[str, float] | None:
    """Shares of the prompts that the newest generator asks less often; None without a curriculum."""
    shown = [record for record in records.values() if "easy_prompt_share" in record]
    if not shown:
        return None
    newest = max(shown, key=lambda record: record.get("policy_version", -1))
    return {"easy": newest["easy_prompt_share"], "hard": newest["hard_prompt_share"]}


def _generated_twice(ledger: Ledger, records: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Response tokens that had to be sampled again: of rolled-back trajectories, and of responses that were lost in
    flight with their generator, as far as its last status record knew of them."""
    lost = sum(record.get("tokens_discarded", 0) for name, record in records.items() if _stage(name) == "generate")
    return {"tokens": ledger.dropped.get("rolled_back", Amount()).tokens + lost}


def _tokens(records: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Response tokens processed by each stage so far, summed over its replicas."""
    return {
        stage: sum(record.get("tokens", 0) for name, record in records.items() if _stage(name) == stage)
        for stage in ("generate", "score", "train")
    }
