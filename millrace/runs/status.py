"""The status of a run, from its store alone: during or after the run, from any machine with access to the store.

commit logs, status records, metrics of sync_weights, evaluations, incidents, decisions
      ─► status: the JSON of `millrace status` and of summary.json
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow.compute as pc

from configs.stored import AnnotatorPools, bounds_admission_only
from millrace.evaluation.results import Result, ResultsReader, best_result, measures_by_set
from millrace.evaluation.schedule import read_early_stop
from millrace.rollouts.ledger import Account, Amount, CommittedAmounts
from millrace.rollouts.loader import consumed_by
from millrace.runs.decisions import parse_decision, summarize_decisions
from millrace.runs.history import read_metrics
from millrace.runs.incidents import Incident, summarize_incidents
from millrace.runs.record import CONTROLLER, Attempt, latest_attempt, of_attempt, read_end, read_run, run_state
from storage import layout
from storage.checkpoints import read_latest
from storage.errors import StreamCorrupt
from storage.json_text import RESTORE, parse_as
from storage.progress import FolderReader, read_progress
from storage.stores.base import Store

STAGES = ("generate", "score", "teach", "train", "sync_weights")
_BUSY = 0.1
"""A stage that is idle for less of the time is the bottleneck."""
_PUSH_SHARE = 0.5
"""Weights that travel for more of a step are the bottleneck if no stage is."""
_BOUND = {"train": "trainer-bound", "generate": "generator-bound", "score": "scorer-bound"}
_NO_GROUPS = {"groups_trained": 0, "groups_dropped": 0, "trained": Amount().to_json(), "dropped": {}}
Records = Mapping[str, Mapping[str, Any]]
"""Status records by `<stage>-<replica>`."""


class StatusReader:
    """Reads a run's status repeatedly; each `look` reads only new data. Raises RunMissing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run_id: str = read_run(store)["run_id"]
        self._attempt = latest_attempt(store)
        num_generators, pools = _layout_of(self._attempt)
        # A replay scores and trains another run's trajectories, which are not in its ledger.
        self._is_replay = store.exists(layout.REPLAY)
        self._committed = CommittedAmounts(store, pools=pools, num_generators=0 if self._is_replay else num_generators)
        self._results = ResultsReader(store)
        self._incidents = FolderReader(store, layout.INCIDENTS, partial(parse_as, Incident))
        self._decisions = FolderReader(store, layout.DECISIONS, parse_decision)
        self._pushes = read_metrics(store, "sync_weights", 0)
        self._push_values = defaultdict[str, list[float]](list)

    def look(self, *, weight_sync: bool = True) -> dict[str, Any]:
        """The current status, plain JSON. Raises StreamCorrupt or LedgerMismatch if the run is damaged.

        Without `weight_sync` the metrics of that stage are not read, and its figures are left out.
        """
        # The run may have been resumed since the last look.
        attempt = self._attempt = latest_attempt(self._store)
        config, records = attempt.config, read_progress(self._store)
        of_this_attempt = of_attempt(attempt.number, records)
        state, cause = run_state(read_end(self._store, attempt.number), attempt.t_started, of_this_attempt)
        # The controller's heartbeats are a sign of life and nothing else.
        for some in (records, of_this_attempt):
            some.pop(f"{CONTROLLER}-0", None)
        trainer = records.get("train-0", {})
        if "account" not in trainer:
            trainer = {**self._as_of_checkpoint(), **trainer}
        account = self._account(trainer)
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
            "devices": {name: record["devices"] for name, record in of_this_attempt.items() if record.get("devices")},
            "ready": {name: record.get("t_ready", 0) is not None for name, record in of_this_attempt.items()},
            "advances": sum(record.get("advances", 0) for record in records.values()),
            "incidents": summarize_incidents(self._incidents.read()),
            "decisions": summarize_decisions(self._decisions.read()),
            "policy_versions_used": self._num_versions_used(),
            "staleness": {
                **staleness,
                "bound": attempt.max_staleness,
                # An earlier start may have kept groups beyond the bound.
                "admission_only": bounds_admission_only(config) or (staleness["max"] or 0) > attempt.max_staleness,
            },
            "trained_to_taken": {"length": trainer.get("length_ratio"), "reward": trainer.get("reward_ratio")},
            "zero_advantage_share": trainer.get("zero_advantage_share"),
            "curriculum": _curriculum(records),
            "sources": _sources(config.get("sources", {}), trainer, records, results),
            "ledger": {**account.ledger(), "generated_twice": _generated_twice(account, records)},
            "seconds": stage_seconds(records),
            "scores": {name: _total(records, "score", name) for name in ("rollouts", "errors")},
            "services": _services(records),
            "tokens": self._tokens(account, records),
            **({"weight_sync": self._weight_sync()} if weight_sync else {}),
        }

    def _as_of_checkpoint(self) -> dict[str, Any]:
        """The trainer's figures at the latest checkpoint, in place of a lost status record."""
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
        generated, scored = self._committed.look()
        account.balance(generated=generated, scored=scored, consumed=consumed)
        return account

    def _num_versions_used(self) -> int:
        """Number of policy versions from the oldest to the newest that sampled a trajectory."""
        heads = [reader.cursor for reader in self._committed.trajectories if reader.cursor.part > 0]
        oldest = min((head.min_policy_version for head in heads), default=0)
        return max((head.max_policy_version for head in heads), default=-1) - oldest + 1

    def _tokens(self, account: Account, records: Records) -> dict[str, int]:
        """Response tokens that each stage has committed so far."""
        if self._is_replay:
            return {stage: _total(records, stage, "tokens") for stage in ("generate", "score", "train")}
        return {
            "generate": account.generated.tokens,
            "score": account.generated.tokens - account.in_flight.tokens,
            "train": account.trained.tokens,
        }

    def _weight_sync(self) -> dict[str, Any]:
        # Damaged parts are skipped; `millrace fsck` lists them.
        for part in self._pushes.readable():
            names, values = part.table["name"], part.table["value"]
            for name in ("push_seconds", "push_bytes"):
                self._push_values[name] += values.filter(pc.equal(names, name)).to_pylist()
        seconds = self._push_values["push_seconds"]
        return {
            "transport": self._attempt.config["weights"]["transport"],
            "count": len(seconds),
            "p50_seconds": statistics.median(seconds) if seconds else None,
            "bytes": int(sum(self._push_values["push_bytes"])),
        }


def _layout_of(attempt: Attempt) -> tuple[int, AnnotatorPools]:
    """Number of generators, and the pools of annotators. Raises StreamCorrupt unless all settings needed are valid."""
    config = attempt.config
    try:
        pools, num_generators = AnnotatorPools.of(config), config["generation"]["replicas"]
        needed = (num_generators, attempt.stop_at_step, attempt.max_staleness, config["weights"]["transport"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StreamCorrupt(attempt.path, f"its config is incomplete: {error!r}; {RESTORE}") from error
    kinds = [type(value) for value in (*needed, *pools.replicas, *pools.replicas.values())]
    if kinds != [int, int, int, str, *[str] * len(pools.replicas), *[int] * len(pools.replicas)]:
        raise StreamCorrupt(attempt.path, f"its config has values of other types than a run's; {RESTORE}")
    return num_generators, pools


def _seconds_left(attempt: Attempt, step: int, step_seconds: float | None, wall_seconds: float) -> float | None:
    """Time until this attempt's training ends, by its last step or its budget; None if neither is known yet."""
    minutes = attempt.config.get("budget", {}).get("duration_minutes")
    limits = [] if minutes is None else [60 * minutes - wall_seconds]
    if step_seconds is not None:
        limits.append((attempt.stop_at_step - step) * step_seconds)
    return max(0.0, min(limits)) if limits else None


def _start_and_end(results: Sequence[Result]) -> dict[str, Result]:
    """The results of version 0 and of the latest version, as far as they exist."""
    ends = {"start": results[0], "end": results[-1]} if results else {}
    return {name: result for name, result in ends.items() if (result["policy_version"] == 0) == (name == "start")}


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


def _services(records: Records) -> dict[str, float]:
    """Requests to services for scores, their tokens and cost; empty without requests."""
    totals: Counter[str] = Counter()
    for record in records.values():
        totals.update({name.rpartition("/")[2]: value for name, value in record.items() if name.startswith("service/")})
    return dict(totals)


def stage_seconds(records: Records) -> dict[str, float]:
    """Busy and idle time of each stage, summed over its replicas; `sync` is short for sync_weights."""
    totals: dict[str, float] = {}
    for stage in STAGES:
        short = "sync" if stage == "sync_weights" else stage
        replicas = [record["seconds"] for name, record in records.items() if _stage(name) == stage]
        totals[short] = sum(s for seconds in replicas for what, s in seconds.items() if what != "idle")
        totals[f"idle_{short}"] = sum(seconds.get("idle", 0.0) for seconds in replicas)
    return totals


def _curriculum(records: Records) -> dict[str, float] | None:
    """Shares of the prompts that a generator asks less often; None without a curriculum."""
    shown = (record for record in records.values() if "easy_prompt_share" in record)
    shares = ({"easy": record["easy_prompt_share"], "hard": record["hard_prompt_share"]} for record in shown)
    return next(shares, None)


def _sources(
    names: Iterable[str], trainer: Mapping[str, Any], records: Records, results: Sequence[Result]
) -> dict[str, dict[str, Any]]:
    """Figures of each source in a run with several; {} in others, and before the trainer has started.

    `weight` is that of the newest block of prompts, `reward_mean` that of the last step with groups of the source,
    `accuracy` that of the newest evaluation. Groups and amounts are as in `millrace.rollouts.consumed.SourceLedger`.
    """
    if "sources" not in trainer:
        return {}
    ledgers = {name: trainer["sources"].get(name, _NO_GROUPS) for name in names}
    shown = (record["source_weights"] for record in records.values() if "source_weights" in record)
    weights: Mapping[str, float] = next(shown, {})
    sets = results[-1].get("sets", {}) if results else {}
    total = sum(ledger["groups_trained"] for ledger in ledgers.values())
    return {
        name: {
            "weight": weights.get(name),
            "trained_share": ledger["groups_trained"] / total if total else None,
            "reward_mean": trainer.get("source_rewards", {}).get(name),
            "accuracy": sets.get(name, {}).get("accuracy"),
            **ledger,
        }
        for name, ledger in ledgers.items()
    }


def _generated_twice(account: Account, records: Records) -> dict[str, int]:
    """Response tokens of rolled-back trajectories, and of responses lost in flight with their generator."""
    lost = _total(records, "generate", "tokens_discarded")
    return {"tokens": account.dropped.get("rolled_back", Amount()).tokens + lost}


def staleness_trained(account: Account) -> dict[str, Any]:
    """Staleness of the trained trajectories, policy versions: histogram, mean and maximum."""
    histogram = account.staleness
    total = histogram.total()
    return {
        "histogram": {str(staleness): count for staleness, count in sorted(histogram.items())},
        "mean": sum(staleness * count for staleness, count in histogram.items()) / total if total else None,
        "max": max(histogram, default=None),
    }


def largest_and_bound(largest: object, bound: int, *, admission_only: bool) -> str:
    """The largest staleness next to its bound: "2 of 4", or "16, admitted within 4" if that limits admission only."""
    return f"{largest}, admitted within {bound}" if admission_only else f"{largest} of {bound}"


class Bottleneck(NamedTuple):
    stage: str | None
    """`train`, `generate`, `score` or `sync_weights`; None if stages wait for each other."""
    sentence: str
    """With idle shares: "trainer-bound: train 99% busy, generate idle 44%"."""


def find_bottleneck(
    idle: Mapping[str, float], *, sync: bool, step_seconds: float | None = None, push: float = 0.0
) -> Bottleneck:
    """The bottleneck of stages that are `idle` for these shares of the time; a stage that is missing counts as idle.

    `push`: seconds that a version travels to the generators.
    """
    stage = min(_BOUND, key=lambda name: idle.get(name, 1.0))
    shares = {name: f"{name} idle {idle.get(name, 1.0):.0%}" for name in ("train", "generate")}
    if idle.get(stage, 1.0) <= _BUSY:
        idle_shares = ", ".join(share for name, share in shares.items() if name != stage)
        return Bottleneck(stage, f"{_BOUND[stage]}: {stage} {1 - idle[stage]:.0%} busy, {idle_shares}")
    both = ", ".join(shares.values())
    travelling = f"a version takes {push:.3g} s to the generators"
    if sync:
        return Bottleneck(None, f"stages wait for each other: {both}{f'; {travelling}' if push else ''}")
    if step_seconds is not None and push > _PUSH_SHARE * step_seconds:
        return Bottleneck("sync_weights", f"bound by weight sync: {travelling}; {both}")
    waits = "generators wait for the staleness bound or for long responses"
    return Bottleneck(None, f"no stage is always busy: {both}; {waits}")
