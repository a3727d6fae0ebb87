"""Time, throughput and queues of the stages.

    time/<kind>/seconds, each since the previous row ─► cumulative seconds by kind ─┐
    total/tokens, cumulative                         ───────────────────────────────┴─► read at the edges of bins

Bins start at the run's first start. Their width is 2 s, 4 s, 8 s …, for at most 150 bins, so that finished bins rarely
change while the run continues.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dashboard.queries.series import (
    TRAINER,
    ChartLine,
    Floats,
    Track,
    apart,
    ascending,
    metric,
    minutes,
    over_versions,
    replicas,
    thin,
)
from dashboard.read.model import RunData
from millrace.runs.status import STAGES
from millrace.runtime.metrics import TIME

MOST_INTERVALS = 150
SYNC = "sync_weights-0"
WAITING = "waiting for "
"""Prefix of the kinds of idle time."""
_SHORTEST_BIN = 2.0
"""Seconds; interval at which stages record their time."""
_SECONDS = "/seconds"
_MAIN_WORK = {"sync_weights": "sync"}
"""Stage → kind of its main work, if that differs from the stage's name."""
_LABELS = {"update_weights": "paused for weights", "store_unfinished": "store unfinished responses"}


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """A stage's time in the whole run, mean over its replicas."""

    stage: str
    replicas: int
    busy: float
    """Seconds."""
    idle: float
    """Seconds."""


def time_by_replica(run: RunData) -> list[Track]:
    """Returns the time shares of each replica, by stage, over minutes since the run's first start."""
    edges = _edges(run)
    if not len(edges):
        return []
    return [
        Track(name=name, edges=minutes(run, edges), shares=shares)
        for stage in STAGES
        for name in replicas(run, stage)
        if (shares := _shares(run, name, edges))
    ]


def idle(run: RunData) -> Mapping[str, ChartLine]:
    """Stage → share of measured time spent waiting, over minutes; NaN without measurements."""
    edges = _edges(run)
    idle_shares: dict[str, ChartLine] = {}
    for stage in STAGES if len(edges) else ():
        shares = [item for name in replicas(run, stage) for item in _shares(run, name, edges).items()]
        if shares:
            zeros = np.zeros(len(edges) - 1)
            waited = sum((share for kind, share in shares if kind.startswith(WAITING)), zeros)
            whole = sum((share for _, share in shares), zeros)
            with np.errstate(invalid="ignore"):
                idle_shares[stage] = ChartLine(_centers(run, edges), waited / whole)
    return idle_shares


def queue(run: RunData, name: str) -> ChartLine:
    """Returns `buffered_rollouts` or `in_flight_rollouts` at each step, over minutes."""
    rows = metric(run, TRAINER, name)
    return apart(run, thin(ascending(minutes(run, rows["t"]), rows["value"])))


def throughput(run: RunData) -> Mapping[str, ChartLine]:
    """Stage → response tokens per second, summed over replicas, over minutes."""
    edges = _edges(run)
    rates: dict[str, ChartLine] = {}
    for stage in ("generate", "score", "train") if len(edges) else ():
        totals = [metric(run, name, "total/tokens") for name in replicas(run, stage)]
        totals = [rows for rows in totals if len(rows["t"])]
        if totals:
            sums = sum((_total_at(edges, rows["t"], rows["value"]) for rows in totals), np.zeros(len(edges)))
            rates[stage] = apart(run, ChartLine(_centers(run, edges), np.diff(sums) / np.diff(edges)))
    return rates


def stage_times(run: RunData) -> list[StageTime]:
    """Reads the stages' times in all attempts from the status records."""
    stages = []
    for stage in STAGES:
        records = [record for name, record in run.stage_status.items() if name.rpartition("-")[0] == stage]
        times = [record["seconds"] for record in records if "seconds" in record]
        if times:
            idle = sum(seconds.get("idle", 0.0) for seconds in times)
            busy = sum(sum(seconds.values()) for seconds in times) - idle
            stages.append(StageTime(stage=stage, replicas=len(times), busy=busy / len(times), idle=idle / len(times)))
    return stages


def pushes(run: RunData) -> Mapping[str, ChartLine]:
    """Transport, and attempts with it → seconds from the handover of each version until all generators had it."""
    rows = metric(run, SYNC, "push_seconds")
    periods = [list(period) for _, period in groupby(run.info.attempts, lambda attempt: attempt.transport)]
    index = np.searchsorted([attempts[0].t_started for attempts in periods], rows["t"], side="right") - 1
    lines = {}
    for number, (first, *more) in enumerate(periods):
        last = f" to {more[-1].number}" if more else ""
        line = ascending(rows["policy_version"][index == number], rows["value"][index == number])
        lines[f"{first.transport}, attempt {first.number}{last}"] = thin(line)
    return lines


def push_seconds(run: RunData) -> ChartLine:
    """Seconds from the handover of each policy version until all generators had it, for all transports."""
    return thin(over_versions(run, SYNC, "push_seconds"))


def deliveries(run: RunData) -> Mapping[str, ChartLine]:
    """`<replica> by <route>` → seconds from the handover of each policy version until that generator had loaded it."""
    return {
        f"{replica} by {name.removeprefix('delivery/').removesuffix(_SECONDS)}": over_versions(run, replica, name)
        for replica in replicas(run, "generate")
        for name in sorted(run.metrics[replica])
        if name.startswith("delivery/")
    }


def pauses(run: RunData) -> Mapping[str, ChartLine]:
    """Replica → seconds that generation paused for each policy version."""
    name = "pause_seconds"
    return {
        replica: over_versions(run, replica, name)
        for replica in replicas(run, "generate")
        if name in run.metrics[replica]
    }


def usage(run: RunData, name: str) -> Mapping[str, ChartLine]:
    """Replica → use of a resource, including child processes, logged about every two seconds, over minutes."""
    named = {replica: metric(run, replica, name) for stage in STAGES for replica in replicas(run, stage)}
    return {
        replica: apart(run, thin(ChartLine(minutes(run, rows["t"]), rows["value"])))
        for replica, rows in named.items()
        if len(rows["t"])
    }


def occasional_tracks(run: RunData) -> list[Track]:
    """Returns a track of the bootstrap and one of the evaluations, if they ran, over minutes since the first start.

    They log no times. An evaluation's result contains its end and duration; the bootstrap's status record, the time of
    its last update.
    """
    record = run.stage_status.get("bootstrap-0", {})
    starts = [attempt.t_started for attempt in run.info.attempts if attempt.number == record.get("attempt", 0)]
    bootstrap = [(start, record["t"]) for start in starts if record.get("t", start) > start]
    t, seconds = run.evaluations["t"], run.evaluations["seconds"]
    evaluations = list[tuple[float, float]]()
    for begin, end in sorted(np.stack([t - seconds, t], 1)[seconds > 0].tolist()):
        # Evaluations that overlap are drawn as one.
        if evaluations and begin <= evaluations[-1][1]:
            begin, end = evaluations[-1][0], max(end, evaluations.pop()[1])
        evaluations.append((begin, end))
    return [
        Track(
            name=name,
            edges=minutes(run, np.array(spans, np.float64).ravel()),
            # Busy within the spans, idle between them.
            shares={name: np.tile([1.0, 0.0], len(spans))[:-1]},
        )
        for name, spans in (("bootstrap", bootstrap), ("evaluate", evaluations))
        if spans
    ]


def _edges(run: RunData) -> Floats:
    """Edges of the bins, [bins + 1] unix seconds; empty if no stage has recorded its time."""
    start = run.info.attempts[0].t_started
    ends = [
        rows["t"][-1]
        for stage in STAGES
        for replica in replicas(run, stage)
        for name, rows in run.metrics[replica].items()
        if (name.startswith(TIME) or name == "total/tokens") and len(rows["t"])
    ]
    if not ends or max(ends) <= start:
        return np.empty(0)
    seconds, width = float(max(ends)) - start, _SHORTEST_BIN
    while seconds > width * MOST_INTERVALS:
        width *= 2
    edges: Floats = start + width * np.arange(np.ceil(seconds / width) + 1)
    # The last bin is incomplete.
    edges[-1] = start + seconds
    return edges


def _shares(run: RunData, replica: str, edges: Floats) -> dict[str, Floats]:
    """Kind of time → [bins] share of each bin."""
    named = {name: rows for name, rows in run.metrics[replica].items() if name.startswith(TIME) and len(rows["t"])}
    if not named:
        return {}
    measured = np.concatenate([rows["t"] for rows in named.values()])
    ends, index = np.unique(measured, return_inverse=True)
    seconds = np.bincount(index, np.concatenate([rows["value"] for rows in named.values()]))
    # Ends and durations come from two clocks: an interval may seem to overlap the previous one a little.
    begins = np.maximum(ends - seconds, np.append(-np.inf, ends[:-1]))
    widths = np.diff(edges)
    shares = {}
    stage = replica.rpartition("-")[0]
    for name, rows in sorted(named.items(), key=lambda item: _rank(item[0], stage)):
        by_interval = np.bincount(np.searchsorted(ends, rows["t"]), rows["value"], len(ends))
        after = np.cumsum(by_interval)
        times, sums = np.stack([begins, ends], 1).ravel(), np.stack([after - by_interval, after], 1).ravel()
        kind = name.removeprefix(TIME).removesuffix(_SECONDS)
        shares[_LABELS.get(kind, kind)] = np.diff(np.interp(edges, times, sums)) / widths
    return shares


def _rank(name: str, stage: str) -> tuple[bool, bool, str]:
    """Sorts the stage's main work first, then other work, then waiting."""
    main_work = f"{TIME}{_MAIN_WORK.get(stage, stage)}{_SECONDS}"
    return name.startswith(TIME + WAITING), name != main_work, name


def _total_at(edges: Floats, t: Floats, totals: Floats) -> Floats:
    """Interpolates a running total at each edge; NaN after its last measurement."""
    # The first row covers the preceding interval.
    times, values = np.append(t[0] - _SHORTEST_BIN, t), np.append(0.0, totals)
    totals_at_edges: Floats = np.interp(edges, times, values, right=np.nan)
    return totals_at_edges


def _centers(run: RunData, edges: Floats) -> Floats:
    return minutes(run, (edges[:-1] + edges[1:]) / 2)
