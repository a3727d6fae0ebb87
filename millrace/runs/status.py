"""The status of a run, from its store alone: during or after the run, from any machine with access to the store.

commit logs ─► generated, scored, versions used ┐
status records ► trained, dropped, staleness,   ├─► status: the JSON of `millrace status` and of summary.json
                 seconds, process ids           │
metrics of sync_weights ─► pushes               │
evaluations ────────────────────────────────────┘
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.evaluation.results import Result, ResultsReader, best_result, measures_by_set
from millrace.evaluation.schedule import read_early_stop
from millrace.rollouts.ledger import Account, Amount, Ledger, amount_committed, balance, check_scored, log_at_head
from millrace.rollouts.loader import consumed_by
from millrace.runs.decisions import DecisionsReader, decisions_in_short
from millrace.runs.incidents import IncidentsReader, in_short
from millrace.runs.record import (
    CONTROLLER,
    RESTORE,
    Attempt,
    latest_attempt,
    of_attempt,
    read_end,
    read_run,
    run_state,
)
from storage import layout
from storage.checkpoints import read_latest
from storage.errors import StreamCorrupt
from storage.progress import read_progress
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.log import LogReader, check_no_hole
from storage.streams.stream import StreamReader

STAGES = ("generate", "score", "train", "sync_weights")


class StatusReader:
    """Reads a run's status repeatedly; each `look` reads only what is new. Raises RunMissing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run_id: str = read_run(store)["run_id"]
        self._attempt = latest_attempt(store)
        generators, scorers, reward = _layout_of(self._attempt)
        self._trajectories = [LogReader(store, layout.trajectories(g)) for g in range(generators)]
        # A replay scores another run's trajectories, so its scores are not part of its own ledger.
        self._is_replay = store.exists(layout.REPLAY)
        self._scores = [
            log_at_head(store, layout.scores(reward, g, s, scorers))
            for g in range(generators)
            for s in range(scorers)
            if not self._is_replay
        ]
        self._results = ResultsReader(store)
        self._incidents = IncidentsReader(store)
        self._decisions = DecisionsReader(store)
        self._versions_used: set[int] = set()
        self._looked = False
        self._pushes = StreamReader(store, layout.metrics("sync_weights", 0), METRIC)
        self._push_values: dict[str, list[float]] = {"push_seconds": [], "push_bytes": []}

    def look(self) -> dict[str, Any]:
        """The current status, plain JSON. Raises StreamCorrupt or LedgerMismatch if the run is damaged."""
        # The run may have been resumed since the last look.
        self._attempt = latest_attempt(self._store)
        records = read_progress(self._store)
        state = run_state(
            read_end(self._store, self._attempt.number),
            self._attempt.t_started,
            of_attempt(self._attempt.number, records),
        )
        # The controller's heartbeats are a sign of life and nothing else.
        records.pop(f"{CONTROLLER}-0", None)
        trainer = records.get("train-0", {})
        if "account" not in trainer:
            trainer = self._as_of_checkpoint() | trainer
        try:
            account, ledger = self._balanced(trainer)
        except StreamCorrupt:
            raise
        except (KeyError, TypeError, ValueError):
            # The record is something else's.
            trainer = trainer | self._as_of_checkpoint()
            account, ledger = self._balanced(trainer)
        self._read_pushes()
        results = self._results.read()
        staleness = staleness_trained(account)
        early_stop = read_early_stop(self._store, self._attempt.number)
        wall_seconds, step_seconds = self._wall_seconds(records), trainer.get("step_seconds")
        return {
            "run_id": self._run_id,
            "run_url": self._store.url,
            "attempt": self._attempt.number,
            "first_step": self._attempt.first_step,
            "state": state.name,
            "cause": state.cause,
            "steps": trainer.get("policy_version", 0),
            "max_steps": self._attempt.config["training"]["max_steps"],
            "stop_at_step": self._attempt.stop_at_step,
            "rollouts_per_step": self._attempt.config["training"]["groups_per_step"]
            * self._attempt.config["generation"]["group_size"],
            "wall_seconds": wall_seconds,
            "step_seconds": step_seconds,
            "eta_seconds": self._seconds_left(trainer.get("policy_version", 0), step_seconds, wall_seconds)
            if state.name == "running" and early_stop is None
            else None,
            "reward_mean": trainer.get("reward_mean"),
            "eval": _start_and_end(results),
            "evaluations": [_in_short(result) for result in results],
            "best": None if (best := best_result(results)) is None else _in_short(best),
            "early_stop": None if early_stop is None else early_stop.sentence,
            "stage_pids": {name: record["pid"] for name, record in records.items() if _stage(name) in STAGES},
            "doing": {name: record["doing"] for name, record in records.items()},
            "ready": self._ready(records),
            "advances": sum(record.get("advances", 0) for record in records.values()),
            "incidents": in_short(self._incidents.read()),
            "decisions": decisions_in_short(self._decisions.read()),
            "policy_versions_used": len(self._versions_used),
            "staleness": {**staleness, "bound": self._attempt.max_staleness},
            "trained_to_taken": {"length": trainer.get("length_ratio"), "reward": trainer.get("reward_ratio")},
            "zero_advantage_share": trainer.get("zero_advantage_share"),
            "curriculum": _curriculum(records),
            "ledger": {**ledger.to_json(), "generated_twice": _generated_twice(ledger, records)},
            "seconds": _seconds(records),
            "scores": _scores(records),
            "tokens": self._tokens(ledger, records),
            "weight_sync": self._weight_sync(),
        }

    def _as_of_checkpoint(self) -> dict[str, Any]:
        """What the trainer's status record would say if it had ended at the latest checkpoint: that record is lost, or
        was not written yet."""
        checkpoint = read_latest(self._store)
        # A replay keeps no account: what it trains is another run's.
        if checkpoint is None or "account" not in checkpoint.state:
            return {"account": Account().to_json(), "consumed": []}
        return {
            "policy_version": checkpoint.step,
            "account": checkpoint.state["account"],
            "consumed": [amount.to_json() for amount in consumed_by(checkpoint.state["intake"])],
        }

    def _balanced(self, trainer: Mapping[str, Any]) -> tuple[Account, Ledger]:
        """The account in the trainer's record, and the ledger with what is committed now, which is at least as new."""
        account = Account.from_json(trainer["account"])
        consumed = [Amount.from_json(amount) for amount in trainer["consumed"]]
        # Scores first, because their trajectories are already committed.
        scored = amount_committed(self._scores)
        for reader in self._trajectories:
            while (record := reader.next()) is not None:
                if record.kind == "data":
                    self._versions_used.update((record.min_policy_version, record.max_policy_version))
        generated = amount_committed(self._trajectories)
        if not self._looked:
            # A record that is missing before later ones; while a run goes on, the stage that needs it names it.
            for generator, reader in enumerate(self._trajectories):
                check_no_hole(self._store, layout.trajectories(generator), reader.cursor)
            self._looked = True
        check_scored(generated, scored)
        return account, balance(generated=generated, scored=scored, consumed=consumed, account=account)

    def _read_pushes(self) -> None:
        # Damaged parts are skipped; `millrace fsck` lists them.
        for part in self._pushes.readable():
            names, values = part.table["name"].to_pylist(), part.table["value"].to_pylist()
            for name, value in zip(names, values, strict=True):
                if name in self._push_values:
                    self._push_values[name].append(value)

    def _tokens(self, ledger: Ledger, records: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """Response tokens that each stage has committed so far."""
        if self._is_replay:
            # What it scores and trains is another run's, and in no ledger here.
            of_stage = {stage: [one for name, one in records.items() if _stage(name) == stage] for stage in STAGES}
            return {
                stage: sum(record.get("tokens", 0) for record in of_stage[stage])
                for stage in ("generate", "score", "train")
            }
        return {
            "generate": ledger.generated.tokens,
            "score": ledger.generated.tokens - ledger.in_flight.tokens,
            "train": ledger.trained.tokens,
        }

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

    def _ready(self, records: dict[str, dict[str, Any]]) -> dict[str, bool]:
        """Of the processes of this attempt, by name: whether each has got to its actual work."""
        mine = of_attempt(self._attempt.number, records)
        return {name: record.get("t_ready", 0) is not None for name, record in mine.items()}

    def _seconds_left(self, step: int, step_seconds: float | None, wall_seconds: float) -> float | None:
        """Until this attempt's training ends, by its last step or its budget; None if neither is known yet."""
        minutes = self._attempt.config.get("budget", {}).get("duration_minutes")
        found = [] if minutes is None else [60 * minutes - wall_seconds]
        if step_seconds is not None:
            found.append((self._attempt.stop_at_step - step) * step_seconds)
        return max(0.0, min(found)) if found else None


def _layout_of(attempt: Attempt) -> tuple[int, int, str]:
    """Numbers of generators and scorers, and the reward. Raises StreamCorrupt if the record lacks what a look needs."""
    config = attempt.config
    try:
        found = config["generation"]["replicas"], config["scoring"]["replicas"], config["scoring"]["reward"]
        needed = (attempt.stop_at_step, attempt.max_staleness, config["weights"]["transport"])
    except (KeyError, TypeError, ValueError) as error:
        raise StreamCorrupt(attempt.path, f"its config lacks what every run's has: {error!r}; {RESTORE}") from error
    if [type(value) for value in (*found, *needed)] != [int, int, str, int, int, str]:
        raise StreamCorrupt(attempt.path, f"its config has values of other types than a run's; {RESTORE}")
    return found


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


def _scores(records: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Responses that scorers have looked at, and how many of them got no score."""
    scorers = [record for name, record in records.items() if _stage(name) == "score"]
    return {what: sum(record.get(what, 0) for record in scorers) for what in ("rollouts", "errors")}


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
