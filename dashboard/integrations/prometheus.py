"""Metrics of the runs for Prometheus, each with the label `run`.

    Runs.overview ─► every run                       progress, reward, staleness and its bound
    RunReader.look ─► the most recently active runs  rollouts, tokens, time, queues, ledger, status ages, training,
                                                     verdict, restarts

Unknown values are absent, so that a graph shows a gap instead of a zero. `grafana.json` and `alerts.yaml` use these
series.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dashboard.queries.series import TRAINER, metric
from dashboard.queries.stragglers import InFlight, in_flight
from dashboard.queries.verdict.advice import judge
from dashboard.queries.verdict.facts import read_facts
from dashboard.read.model import OverviewRow, RunData
from dashboard.read.runs import Runs
from millrace.errors import MillraceError
from millrace.rollouts.consumed import TRAINED
from millrace.runs.record import STATES
from millrace.runs.status import STAGES
from millrace.runtime.messages import STOPPED
from millrace.runtime.usage import CPU_CORES, GPU_BUSY_SHARE, GPU_MEMORY_BYTES, MEMORY_BYTES
from storage.errors import StorageError

_LOGGER = logging.getLogger(__name__)
MOST_DETAILED = 4
"""Number of runs with all series; each keeps its metrics in memory."""
VERDICT = ("state", "health", "bottleneck", "staleness", "sample_size")
"""Names of the verdict's clauses, in order."""
LEVELS = {"good": 0, "warning": 1, "bad": 2}
"""Level of a clause → value; an unknown clause has none."""

Sample = tuple[str, tuple[str, ...], Any]
"""Family name, values of the labels after `run`, and the value; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class MetricFamily:
    """A metric family; its name ends in its unit."""

    doc: str
    labels: tuple[str, ...] = ()
    """After `run`."""
    counts: bool = False
    """Whether it is a counter. Counters decrease only when a run is rolled back; their samples end in `_total`."""
    newest_of: tuple[str, str] | None = None
    """Stage replica and metric whose newest value is exported; with the label `source`, of each source of a mixture."""


def _gauge(doc: str, *labels: str) -> MetricFamily:
    return MetricFamily(doc=doc, labels=labels)


def _counter(doc: str, *labels: str) -> MetricFamily:
    return MetricFamily(doc=doc, labels=labels, counts=True)


def _newest(metric: str, doc: str, replica: str = "train-0") -> MetricFamily:
    return MetricFamily(doc=doc, newest_of=(replica, metric))


def _newest_by_source(metric: str, doc: str) -> MetricFamily:
    return MetricFamily(doc=f"{doc}, by source of a mixture", labels=("source",), newest_of=("train-0", metric))


FAMILIES: Mapping[str, MetricFamily] = {
    # All runs.
    "millrace_run_state": _gauge("1 for the state that the run is in", "state"),
    "millrace_problems": _gauge("number of errors in reading the run"),
    "millrace_policy_version": _gauge("optimizer steps done: the trainer's policy version"),
    "millrace_policy_version_target": _gauge("policy version at which the run is complete"),
    "millrace_reward_mean": _gauge("mean reward of the last ten steps"),
    "millrace_staleness_mean": _gauge("mean staleness of the last ten steps, policy versions"),
    "millrace_staleness_max": _gauge("largest staleness of the last ten steps, policy versions"),
    "millrace_staleness_bound": _gauge("staleness bound, policy versions; with `too_old: keep` of admission"),
    # The most recently active runs.
    "millrace_evaluation_accuracy": _gauge("held-out accuracy of the newest version evaluated, 0 to 1"),
    "millrace_evaluation_set_accuracy": _gauge(
        "accuracy of the newest version on each further evaluation set, or on each source's", "set"
    ),
    "millrace_rollouts": _counter("rollouts the trainer took, by outcome", "outcome"),
    "millrace_generated_rollouts": _counter("rollouts committed by the generators"),
    "millrace_buffered_rollouts": _gauge("rollouts scored and not yet taken by the trainer"),
    "millrace_in_flight_rollouts": _gauge("rollouts committed and not yet scored"),
    "millrace_tokens": _counter("response tokens a stage has processed", "stage"),
    "millrace_stage_seconds": _counter("time of a stage's replicas together, busy or idle", "stage", "kind"),
    "millrace_ledger_balanced": _gauge("1 if every rollout is accounted for; 0 if not, or if unknown"),
    "millrace_verdict": _gauge(
        "level of each clause of the verdict: 0 good, 1 warning, 2 bad; with the rule that set it", "clause", "cause"
    ),
    "millrace_promoted_version": _gauge("policy version of the checkpoint promoted last; 0 before the first"),
    "millrace_restarts": _counter("starts of a stage's process after its first", "stage", "replica"),
    "millrace_attempts": _counter("starts of the run's controller"),
    "millrace_last_status_seconds": _gauge(
        "age of the status of a stage's process; absent once it has stopped", "stage", "replica"
    ),
    "millrace_cpu_cores": _gauge("CPU cores that a stage's process and its children keep busy", "stage", "replica"),
    "millrace_memory_bytes": _gauge("resident memory of a stage's process and its children", "stage", "replica"),
    "millrace_gpu_busy_share": _gauge(
        "share of the time with a kernel running, mean of the stage's GPUs", "stage", "replica"
    ),
    "millrace_gpu_memory_bytes": _gauge("memory in use on the stage's GPUs, by any process", "stage", "replica"),
    "millrace_generating_requests": _gauge("requests that a generator's engine works on", "replica"),
    "millrace_generating_groups": _gauge("groups admitted and not committed yet", "replica"),
    "millrace_generating_tokens": _gauge("response tokens generated so far for these groups", "replica"),
    "millrace_oldest_group_seconds": _gauge("age of the oldest admitted group, seconds", "replica"),
    "millrace_oldest_group_versions": _gauge(
        "policy versions between the trainer and the oldest weights that sampled the group", "replica"
    ),
    "millrace_continued_tokens": _counter("response tokens continued from earlier processes", "replica"),
    "millrace_discarded_tokens": _counter("response tokens lost when a process ended, and generated again", "replica"),
    "millrace_push_seconds": _newest("push_seconds", "until all generators had the last version", "sync_weights-0"),
    "millrace_generator_pause_seconds": _newest(
        "generator_pause_seconds_max", "longest pause of a generator for the last policy version", "sync_weights-0"
    ),
    "millrace_step_staleness_mean": _newest("staleness_mean", "mean staleness of the last step, policy versions"),
    "millrace_step_staleness_max": _newest("staleness_max", "largest staleness of the last step, policy versions"),
    "millrace_overtaken_groups_mean": _newest("overtaken_groups_mean", "mean of later groups taken first"),
    "millrace_overtaken_groups_max": _newest("overtaken_groups_max", "most later groups taken first"),
    "millrace_masked_token_share": _newest("masked_token_share", "share of the last step's tokens beyond the bound"),
    "millrace_zero_advantage_share": _newest("zero_advantage_share", "share of the last step's groups without spread"),
    "millrace_truncated_share": _newest("truncated_share", "share of the last step's responses that were cut off"),
    "millrace_length_ratio": _newest("length_ratio", "mean length over the last steps, trained over taken"),
    "millrace_reward_ratio": _newest("reward_ratio", "mean reward over the last steps, trained over taken"),
    "millrace_response_length_mean_tokens": _newest("response_length_mean_tokens", "mean length of the last step"),
    "millrace_loss": _newest("loss", "loss of the last step"),
    "millrace_entropy": _newest("entropy", "entropy of the policy at the last step, nats per token"),
    "millrace_gradient_norm": _newest("grad_norm", "norm of the last step's gradient, before clipping"),
    "millrace_clip_fraction": _newest("clip_fraction", "clipped share of the last step's tokens, 0 to 1"),
    "millrace_effective_sample_size": _newest("effective_sample_size", "effective share of the last step's tokens"),
    "millrace_mismatch_kl": _newest("mismatch_kl", "KL of rollout and trainer policy, nats per token"),
    "millrace_importance_ratio_p95": _newest("importance_ratio_p95", "p95 of the last step's ratios"),
    "millrace_source_rollouts": _counter(
        "rollouts the trainer took, by source of a mixture and outcome", "source", "outcome"
    ),
    "millrace_source_reward_mean": _newest_by_source("reward_mean", "mean reward of the last step"),
    "millrace_source_staleness_mean": _newest_by_source("staleness_mean", "mean staleness of the last step, versions"),
    "millrace_source_zero_advantage_share": _newest_by_source("zero_advantage_share", "share of groups without spread"),
    "millrace_source_length_ratio": _newest_by_source("length_ratio", "mean length, trained over taken"),
    "millrace_source_response_length_mean_tokens": _newest_by_source("response_length_mean_tokens", "mean length"),
}

_USAGE = {
    "millrace_cpu_cores": CPU_CORES,
    "millrace_memory_bytes": MEMORY_BYTES,
    "millrace_gpu_busy_share": GPU_BUSY_SHARE,
    "millrace_gpu_memory_bytes": GPU_MEMORY_BYTES,
}


def exposition(runs: Runs) -> bytes:
    """Returns the metrics in text format 0.0.4. Errors in reading a run are counted as its problems."""
    rows = runs.overview()
    detailed: dict[str, RunData] = {}
    unread: set[str] = set()
    # The most recently active runs first.
    for row in sorted(rows, key=lambda row: min(row.ages.values(), default=float("inf")))[:MOST_DETAILED]:
        try:
            if row.problem is None:
                detailed[row.run_id] = runs.reader(row.run_id).look()
        except (MillraceError, StorageError, KeyError):
            # KeyError: the run has just been removed.
            unread.add(row.run_id)
    return expose(rows, detailed, unread)


def expose(rows: Sequence[OverviewRow], detailed: Mapping[str, RunData], unread: Collection[str] = ()) -> bytes:
    """Returns the metrics of runs already read. Keys are folder names, because a copied run keeps its old id.

    `unread`: runs whose details could not be read at all.
    """
    registry = CollectorRegistry()
    registry.register(_Families(rows, detailed, unread))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, rows: Sequence[OverviewRow], detailed: Mapping[str, RunData], unread: Collection[str]) -> None:
        problems = {run_id: len(run.problems) for run_id, run in detailed.items()} | dict.fromkeys(unread, 1)
        self._samples = list[tuple[str, Iterable[Sample]]]()
        for run_id, run in detailed.items():
            try:
                samples = [
                    (name, labels, None if value is None else float(value)) for name, labels, value in _of_run(run)
                ]
                self._samples.append((run_id, samples))
            except Exception:  # Whatever is wrong with one run, the others are exposed.
                _LOGGER.exception("the metrics of %s can't be made", run_id)
                problems[run_id] += 1
        self._samples += [(row.run_id, _of_row(row, problems.get(row.run_id, 0))) for row in rows]

    def collect(self) -> Iterator[Metric]:
        """Yields every family, even without samples, so that a Grafana board can be set up before the first run."""
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
    for name, columns in run.evaluation_sets.items():
        yield "millrace_evaluation_set_accuracy", (name,), columns["accuracy"][-1]
    for source, ledger in run.stage_status.get(TRAINER, {}).get("sources", {}).items():
        for outcome, amount in {TRAINED: ledger["trained"], **ledger["dropped"]}.items():
            yield "millrace_source_rollouts", (source, outcome), amount["rollouts"]
    for replica_name, status in run.stage_status.items():
        stage, _, replica = replica_name.rpartition("-")
        if stage in STAGES and status["doing"] != STOPPED:
            yield "millrace_last_status_seconds", (stage, replica), max(0.0, run.t - status["t"])
            for used, usage in _USAGE.items():
                values = metric(run, replica_name, usage)["value"]
                yield used, (stage, replica), values[-1] if len(values) else None
    yield "millrace_attempts", (), len(run.info.attempts)
    promoted = [a.promotion.policy_version for a in run.info.attempts if a.promotion and a.promotion.promoted]
    yield "millrace_promoted_version", (), promoted[-1] if promoted else 0
    yield from _restarts(run)
    for name, clause in zip(VERDICT, judge(read_facts(run)).clauses, strict=True):
        yield "millrace_verdict", (name, clause.cause), LEVELS.get(clause.level)
    for work in in_flight(run):
        yield from _of_generator(work)
    for family_name, family in FAMILIES.items():
        if family.newest_of is not None:
            parts = {(source,): part for source, part in run.by_source.items()} if family.labels else {(): run}
            for labels, part in parts.items():
                values = metric(part, *family.newest_of)["value"]
                yield family_name, labels, values[-1] if len(values) else None


def _restarts(run: RunData) -> Iterator[Sample]:
    """Includes zeros, so that the first restart is an increase."""
    counts = (run.status or {}).get("incidents", {}).get("restarts", {})
    for name in {**run.stage_status, **counts}:
        stage, _, replica = name.rpartition("-")
        if stage in STAGES:
            yield "millrace_restarts", (stage, replica), counts.get(name, 0)


def _of_generator(work: InFlight) -> Iterator[Sample]:
    labels = (str(work.generator),)
    yield "millrace_generating_requests", labels, work.requests
    yield "millrace_generating_groups", labels, work.groups
    yield "millrace_generating_tokens", labels, work.tokens
    yield "millrace_oldest_group_seconds", labels, work.seconds
    yield "millrace_oldest_group_versions", labels, work.versions
    yield "millrace_continued_tokens", labels, work.continued
    yield "millrace_discarded_tokens", labels, work.discarded


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
