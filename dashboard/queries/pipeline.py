"""The pipeline now: its stages, the queues between them, and the bottleneck."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dashboard.queries.learning import TRAINER
from dashboard.queries.series import metric, replicas
from dashboard.queries.verdict.facts import IDLE_SECONDS, STEPS, read_facts
from dashboard.queries.verdict.rules import bottleneck
from dashboard.read.model import RunData
from millrace.runs.status import STAGES
from millrace.runtime.messages import STOPPED

_BOTTLENECKS = {
    "trainer-bound": "train",
    "generator-bound": "generate",
    "scorer-bound": "score",
    "sync-bound": "sync_weights",
}
_TREND = 0.25
"""A queue grows or shrinks if its mean changes by more than this share from the previous steps to the newest."""


@dataclass(frozen=True, kw_only=True)
class StageNow:
    """One stage, all replicas together."""

    name: str
    replicas: int
    """Replicas with a status record."""
    busy: float | None
    """Busy share; of a running run, in the last two minutes."""
    tokens_per_second: float | None
    """Response tokens per second in the last two minutes, summed over replicas."""
    silent: float | None
    """Age of the oldest status record of the replicas, seconds; None once all have stopped."""
    doing: str
    """Activity in that status record."""
    is_bottleneck: bool
    devices: Mapping[str, Sequence[str]]
    """Replica → its GPUs; only replicas with GPUs."""


@dataclass(frozen=True, kw_only=True)
class QueueNow:
    """A queue between two stages."""

    rollouts: int | None
    trend: int
    """1 if it grows, -1 if it shrinks, else 0."""


@dataclass(frozen=True, kw_only=True)
class BootstrapNow:
    """Progress of making the start model."""

    doing: str
    """Current activity, with its figures."""
    step: int | None
    """Supervised steps done; None, like `most_steps`, if the status record does not contain it."""
    most_steps: int | None


@dataclass(frozen=True, kw_only=True)
class PipelineNow:
    """The pipeline from generation to weight sync."""

    bootstrap: BootstrapNow | None
    """None unless the start model is being made."""

    stages: Sequence[StageNow]
    """generate, score, teach if there are teachers, train, sync_weights."""
    unscored: QueueNow
    scored: QueueNow
    push_seconds: float | None
    """Median time until a recent version ran in all generators."""


def pipeline_now(run: RunData) -> PipelineNow:
    """Returns the pipeline at the time when the run was read."""
    facts = read_facts(run)
    slowest_stage = _BOTTLENECKS.get(bottleneck(facts).cause)
    stages = []
    for stage in STAGES:
        names = [name for name in facts.doing if name.rpartition("-")[0] == stage]
        if stage == "teach" and not names:
            continue
        slowest = max(names, key=lambda name: facts.silent.get(name, -1.0), default=None)
        idle = facts.idle.get(stage)
        devices = {name: run.stage_status[name].get("devices") or () for name in names if name in run.stage_status}
        stages.append(
            StageNow(
                name=stage,
                replicas=len(names),
                busy=None if idle is None else 1.0 - idle,
                tokens_per_second=_tokens_per_second(run, stage),
                silent=None if slowest is None else facts.silent.get(slowest),
                doing="not started" if slowest is None else facts.doing[slowest],
                is_bottleneck=stage == slowest_stage,
                devices={name: gpus for name, gpus in devices.items() if gpus},
            )
        )
    return PipelineNow(
        bootstrap=_bootstrap(run),
        stages=stages,
        unscored=_queue(run, "in_flight", "in_flight_rollouts"),
        scored=_queue(run, "buffered", "buffered_rollouts"),
        push_seconds=facts.push_seconds,
    )


def _bootstrap(run: RunData) -> BootstrapNow | None:
    record = run.stage_status.get("bootstrap-0")
    if record is None or record.get("doing", STOPPED) == STOPPED or "train-0" in run.stage_status:
        return None
    if (run.status or {}).get("state", "running") != "running":
        return None
    step, most = record.get("step"), record.get("most_steps")
    has_steps = isinstance(step, int) and isinstance(most, int)
    return BootstrapNow(
        doing=str(record["doing"]), step=step if has_steps else None, most_steps=most if has_steps else None
    )


def _queue(run: RunData, in_ledger: str, name: str) -> QueueNow:
    ledger = (run.status or {}).get("ledger", {})
    values = metric(run, TRAINER, name)["value"][-2 * STEPS :]
    trend = 0
    if len(values) == 2 * STEPS:
        earlier, newest = float(values[:STEPS].mean()), float(values[STEPS:].mean())
        trend = int(np.sign(newest - earlier)) if abs(newest - earlier) > _TREND * max(earlier, 1.0) else 0
    return QueueNow(rollouts=ledger.get(in_ledger, {}).get("rollouts"), trend=trend)


def _tokens_per_second(run: RunData, stage: str) -> float | None:
    rates = []
    for name in replicas(run, stage):
        rows = metric(run, name, "total/tokens")
        now = rows["t"] > (rows["t"][-1] - IDLE_SECONDS if len(rows["t"]) else 0.0)
        t, totals = rows["t"][now], rows["value"][now]
        if len(t) > 1 and t[-1] > t[0]:
            rates.append(max(0.0, float((totals[-1] - totals[0]) / (t[-1] - t[0]))))
    return sum(rates) if rates else None
