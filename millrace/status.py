"""What a run looks like from its store alone: while it runs, after it, from any machine that sees the store.

commit logs ─► generated, scored, versions used ┐
signs of life ─► trained, dropped, staleness,   ├─► status: the JSON of `millrace status` and of summary.json
                 seconds, process ids           │
metrics of sync_weights ─► pushes               │
evaluations ────────────────────────────────────┘
"""

import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

from millrace.committed import amount_committed
from millrace.ledger import Account, Amount, Ledger, balance
from millrace.run import how_attempt_ended, latest_attempt, read_run
from storage import layout
from storage.errors import NotInStore, PartCorrupt
from storage.log import LogReader
from storage.progress import read_progress
from storage.schema import METRIC
from storage.store import Store
from storage.stream import Part, StreamReader

STAGES = ("generate", "score", "train", "sync_weights")
_SILENT_SECONDS = 20.0
"""A run none of whose stages gave a sign of life for so long is not running."""


class StatusReader:
    """Looks at a run again and again; each look reads only what is new. Raises RunMissing where there is no run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run_id: str = read_run(store)["run_id"]
        self._attempt = latest_attempt(store)
        config = self._attempt.config
        generators, scorers = config["generation"]["replicas"], config["scoring"]["replicas"]
        reward = config["scoring"]["reward"]
        self._trajectories = [LogReader(store, layout.trajectories(g)) for g in range(generators)]
        # The scores of a replay are of another run's trajectories: they are no part of its own ledger.
        scored_here = not store.exists(layout.REPLAY)
        self._scores = [
            LogReader.at_head(store, layout.scores(reward, g, s, scorers))
            for g in range(generators)
            for s in range(scorers)
            if scored_here
        ]
        self._versions_used: set[int] = set()
        self._pushes = StreamReader(store, layout.metrics("sync_weights", 0), METRIC)
        self._push_values: dict[str, list[float]] = {"push_seconds": [], "push_bytes": []}

    @property
    def max_staleness(self) -> int:
        """The bound in force, policy versions."""
        config = self._attempt.config
        return 0 if config["pipeline"]["mode"] == "sync" else int(config["staleness"]["max_staleness"])

    def look(self) -> dict[str, Any]:
        """The status now, plain JSON. Raises StreamCorrupt or LedgerMismatch where the run is damaged."""
        # A run that is resumed while we look has another attempt.
        self._attempt = latest_attempt(self._store)
        lives = read_progress(self._store)
        trainer = lives.get("train-0", {})
        account = Account.from_json(trainer["account"]) if "account" in trainer else Account()
        consumed = [Amount.from_json(amount) for amount in trainer.get("consumed", [])]
        # After the trainer's sign of life: whatever it took is committed by now.
        ledger = self._ledger(account, consumed)
        self._read_pushes()
        return {
            "run_id": self._run_id,
            "run_url": self._store.url,
            "attempt": self._attempt.number,
            "state": self._state(lives),
            "steps": trainer.get("policy_version", 0),
            "max_steps": self._attempt.config["training"]["max_steps"],
            "stop_at_step": self._attempt.stop_at_step,
            "wall_seconds": self._wall_seconds(lives),
            "reward_mean": trainer.get("reward_mean"),
            "eval": self._evaluations(),
            "stage_pids": {name: life["pid"] for name, life in lives.items() if _stage(name) in STAGES},
            "doing": {name: life["doing"] for name, life in lives.items()},
            "policy_versions_used": len(self._versions_used),
            "staleness": {**staleness_trained(account), "bound": self.max_staleness},
            "ledger": ledger.to_json(),
            "seconds": _seconds(lives),
            "tokens": _tokens(lives),
            "weight_sync": self._weight_sync(),
        }

    def _ledger(self, account: Account, consumed: list[Amount]) -> Ledger:
        # Scores first: each of them is of a trajectory that is committed already.
        scored = amount_committed(self._scores)
        for reader in self._trajectories:
            while (record := reader.next()) is not None:
                if record.kind == "data":
                    self._versions_used.update((record.min_policy_version, record.max_policy_version))
        return balance(
            generated=amount_committed(self._trajectories), scored=scored, consumed=consumed, account=account
        )

    def _read_pushes(self) -> None:
        while (part := self._next_push()) is not None:
            names, values = part.table["name"].to_pylist(), part.table["value"].to_pylist()
            for name, value in zip(names, values, strict=True):
                if name in self._push_values:
                    self._push_values[name].append(value)

    def _next_push(self) -> Part | None:
        while True:
            try:
                return self._pushes.next()
            except PartCorrupt:
                # Some measurements less to show; `millrace fsck` names the file.
                self._pushes.next_record()

    def _weight_sync(self) -> dict[str, Any]:
        seconds = self._push_values["push_seconds"]
        return {
            "transport": self._attempt.config["weights"]["transport"],
            "count": len(seconds),
            "p50_seconds": statistics.median(seconds) if seconds else None,
            "bytes": int(sum(self._push_values["push_bytes"])),
        }

    def _evaluations(self) -> dict[str, Any]:
        """The first and the last version measured; `end` is absent until there are two."""
        results = []
        for path in self._store.list(layout.EVALUATIONS):
            try:
                results.append(json.loads(bytes(self._store.get(path))))
            except NotInStore:
                continue
        results.sort(key=lambda result: int(result["policy_version"]))
        found = {}
        if results and results[0]["policy_version"] == 0:
            found["start"] = results[0]
        if results and results[-1]["policy_version"] > 0:
            found["end"] = results[-1]
        return found

    def _state(self, lives: dict[str, dict[str, Any]]) -> str:
        return run_state(how_attempt_ended(self._store, self._attempt.number), self._attempt.t_started, lives)

    def _wall_seconds(self, lives: dict[str, dict[str, Any]]) -> float:
        """Of this attempt, to its last sign of life."""
        newest = max((life["t"] for life in lives.values()), default=self._attempt.t_started)
        return max(0.0, newest - self._attempt.t_started)


def _stage(name: str) -> str:
    return name.rpartition("-")[0]


def run_state(ended: str | None, t_started: float, lives: Mapping[str, Mapping[str, Any]]) -> str:
    """`finished`, `stopped` or `running`: what an attempt that was started at `t_started` (unix seconds) is now.

    `ended` is what its controller said at its end, if anything; `lives` are the run's signs of life.
    """
    if ended:
        return ended
    newest = max((life["t"] for life in lives.values()), default=t_started)
    return "running" if time.time() - newest < _SILENT_SECONDS else "stopped"


def staleness_trained(account: Account) -> dict[str, Any]:
    """Of the trained rollouts, policy versions: their number by staleness, its mean and its maximum."""
    histogram = account.staleness
    total = histogram.total()
    return {
        "histogram": {str(staleness): count for staleness, count in sorted(histogram.items())},
        "mean": sum(staleness * count for staleness, count in histogram.items()) / total if total else None,
        "max": max(histogram, default=None),
    }


def _seconds(lives: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Busy and idle time of each stage, summed over its replicas; `sync` is short for sync_weights."""
    totals: dict[str, float] = {}
    for stage in STAGES:
        short = "sync" if stage == "sync_weights" else stage
        replicas = [life["seconds"] for name, life in lives.items() if _stage(name) == stage]
        totals[short] = sum(s for seconds in replicas for what, s in seconds.items() if what != "idle")
        totals[f"idle_{short}"] = sum(seconds.get("idle", 0.0) for seconds in replicas)
    return totals


def _tokens(lives: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Response tokens that each stage has dealt with so far, summed over its replicas."""
    return {
        stage: sum(life.get("tokens", 0) for name, life in lives.items() if _stage(name) == stage)
        for stage in ("generate", "score", "train")
    }
