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
from millrace.rollouts.ledger import Account, Amount, amount_committed, check_scored, log_at_head
from millrace.rollouts.loader import consumed_by
from millrace.runs.decisions import parse_decision, summarize_decisions
from millrace.runs.figures import staleness_trained
from millrace.runs.incidents import parse_incident, summarize_incidents
from millrace.runs.record import CONTROLLER, Attempt, latest_attempt, of_attempt, read_end, read_run, run_state
from storage import layout
from storage.checkpoints import read_latest
from storage.errors import StreamCorrupt
from storage.json_text import RESTORE
from storage.progress import FolderReader, read_progress
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.log import LogReader, check_no_hole
from storage.streams.stream import StreamReader

STAGES = ("generate", "score", "train", "sync_weights")
Records = Mapping[str, Mapping[str, Any]]
"""Status records by `<stage>-<replica>`."""


class StatusReader:
    """Reads a run's status repeatedly; each `look` reads only new data. Raises RunMissing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run_id: str = read_run(store)["run_id"]
        self._attempt = latest_attempt(store)
        generators, scorers, reward = _layout_of(self._attempt)
        self._trajectories = [LogReader(store, layout.trajectories(g)) for g in range(generators)]
        # A replay scores another run's trajectories, so its scores are not in its ledger.
        self._is_replay = store.exists(layout.REPLAY)
        self._scores = [
            log_at_head(store, layout.scores(reward, g, s, scorers))
            for g in range(generators)
            for s in range(scorers)
            if not self._is_replay
        ]
        self._results = ResultsReader(store)
        self._incidents = FolderReader(store, layout.INCIDENTS, parse_incident)
        self._decisions = FolderReader(store, layout.DECISIONS, parse_decision)
        self._versions_used: set[int] = set()
        self._looked = False
        self._pushes = StreamReader(store, layout.metrics("sync_weights", 0), METRIC)
        self._push_values: dict[str, list[float]] = {"push_seconds": [], "push_bytes": []}

    def look(self) -> dict[str, Any]:
        """The current status, plain JSON. Raises StreamCorrupt or LedgerMismatch if the run is damaged."""
        # The run may have been resumed since the last look.
        attempt = self._attempt = latest_attempt(self._store)
        config, records = attempt.config, read_progress(self._store)
        of_this_attempt = of_attempt(attempt.number, records)
        state, cause = run_state(read_end(self._store, attempt.number), attempt.t_started, of_this_attempt)
        # The controller's heartbeats are a sign of life and nothing else.
        for some in (records, of_this_attempt):
            some.pop(f"{CONTROLLER}-0", None)
        trainer, account = self._balanced(records.get("train-0", {}))
        step, step_seconds = trainer.get("policy_version", 0), trainer.get("step_seconds")
        newest = max((record["t"] for record in records.values()), default=attempt.t_started)
        wall_seconds = max(0.0, newest - attempt.t_started)
        results, staleness = self._results.read(), staleness_trained(account)
        early_stop, best = read_early_stop(self._store, attempt.number), best_result(results)
        may_go_on = state == "running" and early_stop is None
        return {
            "run_id": self._run_id,
            "run_url": self._store.url,
            "attempt": attempt.number,
            "first_step": attempt.first_step,
            "state": state,
            "cause": cause,
            "steps": step,
            "max_steps": config["training"]["max_steps"],
            "stop_at_step": attempt.stop_at_step,
            "rollouts_per_step": config["training"]["groups_per_step"] * config["generation"]["group_size"],
            "wall_seconds": wall_seconds,
            "step_seconds": step_seconds,
            "eta_seconds": _seconds_left(attempt, step, step_seconds, wall_seconds) if may_go_on else None,
            "reward_mean": trainer.get("reward_mean"),
            "eval": _start_and_end(results),
            "evaluations": [_summarize(result) for result in results],
            "best": None if best is None else _summarize(best),
            "early_stop": None if early_stop is None else early_stop.sentence,
            "stage_pids": {name: record["pid"] for name, record in records.items() if _stage(name) in STAGES},
            "doing": {name: record["doing"] for name, record in records.items()},
            "ready": {name: record.get("t_ready", 0) is not None for name, record in of_this_attempt.items()},
            "advances": sum(record.get("advances", 0) for record in records.values()),
            "incidents": summarize_incidents(self._incidents.read()),
            "decisions": summarize_decisions(self._decisions.read()),
            "policy_versions_used": len(self._versions_used),
            "staleness": {**staleness, "bound": attempt.max_staleness},
            "trained_to_taken": {"length": trainer.get("length_ratio"), "reward": trainer.get("reward_ratio")},
            "zero_advantage_share": trainer.get("zero_advantage_share"),
            "curriculum": _curriculum(records),
            "ledger": {**account.ledger(), "generated_twice": _generated_twice(account, records)},
            "seconds": _seconds(records),
            "scores": {name: _total(records, "score", name) for name in ("rollouts", "errors")},
            "tokens": self._tokens(account, records),
            "weight_sync": self._weight_sync(),
        }

    def _balanced(self, trainer: Mapping[str, Any]) -> tuple[Mapping[str, Any], Account]:
        """The trainer's status record and its balanced account; by the checkpoint if the record can't be used."""
        if "account" not in trainer:
            trainer = {**self._as_of_checkpoint(), **trainer}
        try:
            return trainer, self._account(trainer)
        except StreamCorrupt:
            raise
        except (KeyError, TypeError, ValueError):
            trainer = {**trainer, **self._as_of_checkpoint()}
            return trainer, self._account(trainer)

    def _as_of_checkpoint(self) -> dict[str, Any]:
        """The trainer's status record if it had ended at the latest checkpoint."""
        checkpoint = read_latest(self._store)
        # A replay keeps no account: it trains another run's trajectories.
        if checkpoint is None or "account" not in checkpoint.state:
            return {"account": Account().to_json(), "consumed": []}
        return {
            "policy_version": checkpoint.step,
            "account": checkpoint.state["account"],
            "consumed": [amount.to_json() for amount in consumed_by(checkpoint.state["intake"])],
        }

    def _account(self, trainer: Mapping[str, Any]) -> Account:
        """The account in the trainer's record, balanced with everything committed now, which is at least as new."""
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
            # Once: during a run, the stage that needs a missing record names it.
            for generator, reader in enumerate(self._trajectories):
                check_no_hole(self._store, layout.trajectories(generator), reader.cursor)
            self._looked = True
        check_scored(generated, scored)
        account.balance(generated=generated, scored=scored, consumed=consumed)
        return account

    def _tokens(self, account: Account, records: Records) -> dict[str, int]:
        """Response tokens that each stage has committed so far."""
        if self._is_replay:
            # It scores and trains another run's trajectories, which this account does not count.
            return {stage: _total(records, stage, "tokens") for stage in ("generate", "score", "train")}
        return {
            "generate": account.generated.tokens,
            "score": account.generated.tokens - account.in_flight.tokens,
            "train": account.trained.tokens,
        }

    def _weight_sync(self) -> dict[str, Any]:
        # Damaged parts are skipped; `millrace fsck` lists them.
        for part in self._pushes.readable():
            for row in part.table.to_pylist():
                if row["name"] in self._push_values:
                    self._push_values[row["name"]].append(row["value"])
        seconds = self._push_values["push_seconds"]
        return {
            "transport": self._attempt.config["weights"]["transport"],
            "count": len(seconds),
            "p50_seconds": statistics.median(seconds) if seconds else None,
            "bytes": int(sum(self._push_values["push_bytes"])),
        }


def _layout_of(attempt: Attempt) -> tuple[int, int, str]:
    """Numbers of generators and scorers, and the reward. Raises StreamCorrupt if a setting is missing."""
    config = attempt.config
    try:
        figures = config["generation"]["replicas"], config["scoring"]["replicas"], config["scoring"]["reward"]
        needed = (attempt.stop_at_step, attempt.max_staleness, config["weights"]["transport"])
    except (KeyError, TypeError, ValueError) as error:
        raise StreamCorrupt(attempt.path, f"its config is incomplete: {error!r}; {RESTORE}") from error
    if [type(value) for value in (*figures, *needed)] != [int, int, str, int, int, str]:
        raise StreamCorrupt(attempt.path, f"its config has values of other types than a run's; {RESTORE}")
    return figures


def _seconds_left(attempt: Attempt, step: int, step_seconds: float | None, wall_seconds: float) -> float | None:
    """Time until this attempt's training ends, by its last step or its budget; None if neither is known yet."""
    minutes = attempt.config.get("budget", {}).get("duration_minutes")
    limits = [] if minutes is None else [60 * minutes - wall_seconds]
    if step_seconds is not None:
        limits.append((attempt.stop_at_step - step) * step_seconds)
    return max(0.0, min(limits)) if limits else None


def _start_and_end(results: Sequence[Result]) -> dict[str, Result]:
    """The results of version 0 and of the latest version, as far as they exist."""
    ends: dict[str, Result] = {}
    if results and results[0]["policy_version"] == 0:
        ends["start"] = results[0]
    if results and results[-1]["policy_version"] > 0:
        ends["end"] = results[-1]
    return ends


def _summarize(result: Result) -> dict[str, Any]:
    """A result's version, and the accuracy of each set."""
    return {
        "policy_version": result["policy_version"],
        "accuracy": {name: measures["accuracy"] for name, measures in measures_by_set(result).items()},
        "interval": result.get("accuracy_interval"),
        "prompts": result["prompts"],
    }


def _stage(name: str) -> str:
    return name.rpartition("-")[0]


def _total(records: Records, stage: str, name: str) -> int:
    """The sum of a count in the status records of a stage's replicas."""
    return sum(record.get(name, 0) for replica, record in records.items() if _stage(replica) == stage)


def _seconds(records: Records) -> dict[str, float]:
    """Busy and idle time of each stage, summed over its replicas; `sync` is short for sync_weights."""
    totals: dict[str, float] = {}
    for stage in STAGES:
        short = "sync" if stage == "sync_weights" else stage
        replicas = [record["seconds"] for name, record in records.items() if _stage(name) == stage]
        totals[short] = sum(s for seconds in replicas for what, s in seconds.items() if what != "idle")
        totals[f"idle_{short}"] = sum(seconds.get("idle", 0.0) for seconds in replicas)
    return totals


def _curriculum(records: Records) -> dict[str, float] | None:
    """Shares of the prompts that the newest generator asks less often; None without a curriculum."""
    shown = [record for record in records.values() if "easy_prompt_share" in record]
    if not shown:
        return None
    newest = max(shown, key=lambda record: record.get("policy_version", -1))
    return {"easy": newest["easy_prompt_share"], "hard": newest["hard_prompt_share"]}


def _generated_twice(account: Account, records: Records) -> dict[str, int]:
    """Response tokens that had to be sampled again: of rolled-back trajectories, and of responses that were lost in
    flight with their generator, as far as its last status record knew of them."""
    lost = _total(records, "generate", "tokens_discarded")
    return {"tokens": account.dropped.get("rolled_back", Amount()).tokens + lost}
