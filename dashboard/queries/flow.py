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

from dashboard.queries.learning import TRAINER
from dashboard.queries.series import ChartLine, Floats, Track, ascending, metric, minutes, over_versions, replicas, thin
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


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap of the stages' work, computed as in `benchmarks.async_vs_sync`, but within one run."""

    busy: float
    """Σ of the stages' busy times, seconds: the duration of running one stage at a time."""
    slowest: str
    """The stage with the longest busy time."""
    bound: float
    """Σ ÷ the longest: the speed-up of perfect overlap."""
    wall: float
    """Time that the trainer ran, seconds."""
    overlap: float
    """Σ ÷ wall: the actual speed-up."""

    @property
    def share(self) -> float:
        """Overlap ÷ bound."""
        return self.overlap / self.bound


@dataclass(frozen=True, kw_only=True)
class TransportPeriod:
    """Consecutive attempts with the same transport."""

    transport: str
    first: int
    """Number of its first attempt."""
    last: int
    seconds: ChartLine
    """Seconds from the handover of each policy version until all generators had it."""


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
    return thin(ascending(minutes(run, rows["t"]), rows["value"]))


def throughput(run: RunData) -> Mapping[str, ChartLine]:
    """Stage → response tokens per second, summed over replicas, over minutes."""
    edges = _edges(run)
    rates: dict[str, ChartLine] = {}
    for stage in ("generate", "score", "train") if len(edges) else ():
        totals = [metric(run, name, "total/tokens") for name in replicas(run, stage)]
        totals = [rows for rows in totals if len(rows["t"])]
        if totals:
            sums = sum((_total_at(edges, rows["t"], rows["value"]) for rows in totals), np.zeros(len(edges)))
            rates[stage] = ChartLine(_centers(run, edges), np.diff(sums) / np.diff(edges))
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


def overlap(run: RunData) -> Overlap | None:
    """Computes the overlap from the stages' mean times, as replicas run in parallel; None before the trainer works."""
    times = stage_times(run)
    wall = sum(time.busy + time.idle for time in times if time.stage == "train")
    longest = max(times, key=lambda time: time.busy, default=None)
    if longest is None or not longest.busy or not wall:
        return None
    busy = sum(time.busy for time in times)
    return Overlap(busy=busy, slowest=longest.stage, bound=busy / longest.busy, wall=wall, overlap=busy / wall)


def pushes(run: RunData) -> list[TransportPeriod]:
    """Returns the time until weights reached all generators, by transport."""
    rows = metric(run, SYNC, "push_seconds")
    periods = [list(period) for _, period in groupby(run.info.attempts, lambda attempt: attempt.transport)]
    index = np.searchsorted([attempts[0].t_started for attempts in periods], rows["t"], side="right") - 1
    return [
        TransportPeriod(
            transport=attempts[0].transport,
            first=attempts[0].number,
            last=attempts[-1].number,
            seconds=thin(ascending(rows["policy_version"][index == number], rows["value"][index == number])),
        )
        for number, attempts in enumerate(periods)
    ]


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
