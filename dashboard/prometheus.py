"""The main series of the runs, as Prometheus scrapes them; each with the label `run`.

    Runs.overview ─► every run                 how far it is, its reward, its staleness beside the bound
    RunReader.look ─► those heard from last    rollouts, tokens, time, queues, ledger, signs of life, training

What is not known yet is absent, so that a graph has a gap there, and no zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dashboard.data import RunData
from dashboard.runs import OverviewRow, Runs
from millrace.errors import MillraceError
from millrace.events import STOPPED
from millrace.status import STAGES
from storage.errors import StorageError

MOST_DETAILED = 4
"""Of so many runs everything is told: what a run consumed is kept in memory for it."""
STATES = ("running", "finished", "stopped")

Sample = tuple[str, tuple[str, ...], Any]
"""Name of the family, values of its labels behind `run`, and the number; None where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A series, and what it says; its unit is the last word of its name, where it has one."""

    doc: str
    labels: tuple[str, ...] = ()
    """Behind `run`."""
    counts: bool = False
    """It grows, except where a run goes back to a checkpoint. Its samples' names end in `_total`."""


FAMILIES: Mapping[str, Family] = {
    # Of every run.
    "millrace_run_state": Family(doc="1 for the state that the run is in", labels=("state",)),
    "millrace_problems": Family(doc="sentences on what of the run can't be read; 0 is well"),
    "millrace_policy_version": Family(doc="optimizer steps done: the trainer's policy version"),
    "millrace_policy_version_target": Family(doc="policy version with which the run is complete"),
    "millrace_reward_mean": Family(doc="mean reward of the last step's trajectories"),
    "millrace_staleness_mean": Family(doc="mean staleness of all trained rollouts, policy versions"),
    "millrace_staleness_max": Family(doc="largest staleness of all trained rollouts, policy versions"),
    "millrace_staleness_bound": Family(doc="largest staleness allowed, policy versions"),
    # Of the runs heard from last.
    "millrace_evaluation_accuracy": Family(doc="held-out accuracy of the newest version evaluated, 0 to 1"),
    "millrace_rollouts": Family(doc="rollouts the trainer took, by their fate", labels=("outcome",), counts=True),
    "millrace_generated_rollouts": Family(doc="rollouts committed by the generators", counts=True),
    "millrace_buffered_rollouts": Family(doc="rollouts scored and not yet taken by the trainer"),
    "millrace_in_flight_rollouts": Family(doc="rollouts committed and not yet scored"),
    "millrace_tokens": Family(doc="response tokens a stage has dealt with", labels=("stage",), counts=True),
    "millrace_stage_seconds": Family(
        doc="time of a stage's replicas together, busy or idle", labels=("stage", "kind"), counts=True
    ),
    "millrace_ledger_balanced": Family(doc="1 if every rollout is accounted for; 0 if not, or if it can't be told"),
    "millrace_last_sign_of_life_seconds": Family(
        doc="time since a stage's process said that it is there; absent once it has said that it stopped",
        labels=("stage", "replica"),
    ),
    "millrace_push_seconds": Family(doc="from a new policy version to its arrival at every generator, the last one"),
    "millrace_generator_pause_seconds": Family(doc="longest pause of a generator for the last new policy version"),
    "millrace_step_staleness_mean": Family(doc="mean staleness of the last step's groups, policy versions"),
    "millrace_step_staleness_max": Family(doc="largest staleness of the last step's groups, policy versions"),
    "millrace_response_length_mean_tokens": Family(doc="mean response length of the last step"),
    "millrace_loss": Family(doc="loss of the last step"),
    "millrace_entropy": Family(doc="entropy of the policy at the last step, nats a token"),
    "millrace_gradient_norm": Family(doc="norm of the last step's gradient, before clipping"),
    "millrace_clip_fraction": Family(doc="share of the last step's tokens whose importance ratio was clipped, 0 to 1"),
    "millrace_effective_sample_size": Family(doc="effective share of the last step's tokens, by weight, 0 to 1"),
    "millrace_mismatch_kl": Family(doc="KL of rollout policy and trainer policy at the last step, nats a token"),
    "millrace_importance_ratio_p95": Family(doc="95th percentile of the last step's importance ratios"),
}  # fmt: skip

_LAST_MEASURED: Mapping[str, tuple[str, str]] = {
    "millrace_push_seconds": ("sync_weights-0", "push_seconds"),
    "millrace_generator_pause_seconds": ("sync_weights-0", "generator_pause_seconds_max"),
    "millrace_step_staleness_mean": ("train-0", "staleness_mean"),
    "millrace_step_staleness_max": ("train-0", "staleness_max"),
    "millrace_response_length_mean_tokens": ("train-0", "response_length_mean_tokens"),
    "millrace_loss": ("train-0", "loss"),
    "millrace_entropy": ("train-0", "entropy"),
    "millrace_gradient_norm": ("train-0", "grad_norm"),
    "millrace_clip_fraction": ("train-0", "clip_fraction"),
    "millrace_effective_sample_size": ("train-0", "effective_sample_size"),
    "millrace_mismatch_kl": ("train-0", "mismatch_kl"),
    "millrace_importance_ratio_p95": ("train-0", "importance_ratio_p95"),
}
"""Series that are the newest value of a metric: of which stage replica, and its name there."""


def exposition(runs: Runs) -> bytes:
    """The text that Prometheus scrapes, format 0.0.4. What can't be read of a run is counted, and the rest told."""
    rows = runs.overview()
    found: list[RunData] = []
    unread: set[str] = set()
    for row in sorted(rows, key=_silence)[:MOST_DETAILED]:
        try:
            if row.problem is None:
                found.append(runs.reader(row.run_id).look())
        except (MillraceError, StorageError, KeyError):
            # KeyError: the run was removed just now.
            unread.add(row.run_id)
    return expose(rows, found, unread)


def expose(
    rows: Sequence[OverviewRow], found: Sequence[RunData], unread: frozenset[str] | set[str] = frozenset()
) -> bytes:
    """The same of what is known already; `unread` are the runs whose details could not be read at all."""
    registry = CollectorRegistry()
    registry.register(_Families(rows, found, unread))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(
        self, rows: Sequence[OverviewRow], found: Sequence[RunData], unread: frozenset[str] | set[str]
    ) -> None:
        problems = {run.facts.run_id: len(run.problems) for run in found} | dict.fromkeys(unread, 1)
        self._samples = [(row.run_id, _of_row(row, problems.get(row.run_id, 0))) for row in rows]
        self._samples += [(run.facts.run_id, _of_run(run)) for run in found]

    def collect(self) -> Iterator[Metric]:
        """Every family, those without a sample too: a board is drawn before the first run has begun."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: (CounterMetricFamily if family.counts else GaugeMetricFamily)(
                name, family.doc, labels=("run", *family.labels)
            )
            for name, family in FAMILIES.items()
        }
        for run_id, samples in self._samples:
            for name, labels, value in samples:
                if value is not None:
                    families[name].add_metric((run_id, *labels), float(value))
        yield from families.values()


def _silence(row: OverviewRow) -> float:
    """Seconds for which nothing was heard of the run."""
    return min(row.ages.values(), default=float("inf"))


def _of_row(row: OverviewRow, problems: int) -> Iterator[Sample]:
    yield "millrace_problems", (), problems + (row.problem is not None)
    if row.problem is None:
        yield from (("millrace_run_state", (state,), row.state == state) for state in STATES)
    yield "millrace_policy_version", (), row.policy_version
    yield "millrace_policy_version_target", (), row.max_steps
    yield "millrace_reward_mean", (), row.reward_mean
    yield "millrace_staleness_mean", (), row.staleness_mean
    yield "millrace_staleness_max", (), row.staleness_max
    yield "millrace_staleness_bound", (), row.max_staleness


def _of_run(run: RunData) -> Iterator[Sample]:
    yield "millrace_ledger_balanced", (), run.status is not None
    if run.status is not None:
        yield from _of_status(run.status)
    accuracy = run.evaluations["accuracy"]
    yield "millrace_evaluation_accuracy", (), accuracy[-1] if len(accuracy) else None
    for life_name, life in run.lives.items():
        stage, _, replica = life_name.rpartition("-")
        if stage in STAGES and life["doing"] != STOPPED:
            yield "millrace_last_sign_of_life_seconds", (stage, replica), max(0.0, run.t - life["t"])
    for name, (of_stage, metric) in _LAST_MEASURED.items():
        measured = run.metrics.get(of_stage, {}).get(metric)
        yield name, (), measured["value"][-1] if measured is not None and len(measured["value"]) else None


def _of_status(status: Mapping[str, Any]) -> Iterator[Sample]:
    ledger = status["ledger"]
    yield "millrace_generated_rollouts", (), ledger["generated"]["rollouts"]
    yield "millrace_buffered_rollouts", (), ledger["buffered"]["rollouts"]
    yield "millrace_in_flight_rollouts", (), ledger["in_flight"]["rollouts"]
    yield "millrace_rollouts", ("trained",), ledger["trained"]["rollouts"]
    yield from (("millrace_rollouts", (why,), amount["rollouts"]) for why, amount in ledger["dropped"].items())
    yield from (("millrace_tokens", (stage,), tokens) for stage, tokens in status["tokens"].items())
    for name, seconds in status["seconds"].items():
        kind = "idle" if name.startswith("idle_") else "busy"
        stage = name.removeprefix("idle_")
        yield "millrace_stage_seconds", ("sync_weights" if stage == "sync" else stage, kind), seconds
