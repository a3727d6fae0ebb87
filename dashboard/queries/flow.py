"""What each stage's time goes into, how fast tokens move, and what stands between two stages.

    lane/<kind>/seconds, each since the row before ─► seconds by kind up to a time ─┐
    total/tokens, so far                           ─► tokens up to a time ──────────┴─► read at the edges of bins

Bins are equal stretches of time since the run was first started: of 2 s or 4 s or 8 s …, at most 150 of them, so that
those that are over stay as they are while a run goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dashboard.data import AttemptFacts, RunData
from dashboard.queries.learning import TRAINER
from dashboard.queries.series import Floats, Line, ascending, averaged, metric, minutes, over_versions, replicas, thin
from millrace.status import STAGES

MOST_INTERVALS = 150
SYNC = "sync_weights-0"
WAITING = "waiting for "
"""How the kinds begin that are not work."""
_SHORTEST_BIN = 2.0
"""Seconds; stages measure their lanes so often."""
_LANE, _SECONDS = "lane/", "/seconds"
_OWN = {"sync_weights": "sync"}
"""What a stage's own work is called, where not like the stage."""
_SPOKEN = {"update_weights": "paused for weights"}


@dataclass(frozen=True, kw_only=True)
class ReplicaTime:
    """What the time of one stage replica went into."""

    name: str
    """`<stage>-<replica>`."""
    edges: Floats
    """[bins + 1] minutes since the run was first started."""
    shares: Mapping[str, Floats]
    """Kind of work or reason to wait → [bins] share of the bin, 0 to 1; what is left over was not measured."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """What the time of a stage went into, over the whole run and the mean of its replicas."""

    stage: str
    replicas: int
    busy: float
    """Seconds."""
    idle: float
    """Seconds."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How much of the work went on at once: as `benchmarks.async_vs_sync` reckons, but within one run."""

    busy: float
    """Σ of the stages' busy times, seconds: what the work would take one stage at a time."""
    slowest: str
    """The stage that was busy longest."""
    bound: float
    """Σ ÷ the longest: how much faster perfect overlap would be."""
    wall: float
    """How long the trainer ran, seconds."""
    overlap: float
    """Σ ÷ wall: how much faster it was."""

    @property
    def share(self) -> float:
        """Overlap ÷ bound."""
        return self.overlap / self.bound


@dataclass(frozen=True, kw_only=True)
class Era:
    """Attempts in a row with one transport."""

    transport: str
    first: int
    """Number of its first attempt."""
    last: int
    seconds: Line
    """How long each policy version took from the handover until all generators had it."""


def lanes(run: RunData) -> list[ReplicaTime]:
    """Of every replica that measures its time, stage by stage."""
    edges = _edges(run)
    if not len(edges):
        return []
    return [
        ReplicaTime(name=name, edges=minutes(run, edges), shares=shares)
        for stage in STAGES
        for name in replicas(run, stage)
        if (shares := _shares(run, name, edges))
    ]


def idle(run: RunData) -> Mapping[str, Line]:
    """Stage → share of its measured time that it waited, over minutes; NaN where nothing was measured."""
    edges = _edges(run)
    found: dict[str, Line] = {}
    for stage in STAGES if len(edges) else ():
        lanes = [shares for name in replicas(run, stage) if (shares := _shares(run, name, edges))]
        if lanes:
            waited = sum((share for lane in lanes for kind, share in lane.items() if is_waiting(kind)), _zeros(edges))
            whole = sum((share for lane in lanes for share in lane.values()), _zeros(edges))
            with np.errstate(invalid="ignore"):
                found[stage] = Line(_middles(run, edges), waited / whole)
    return found


def is_waiting(kind: str) -> bool:
    """Whether this kind of a lane is a reason to wait, and no work."""
    return kind.startswith(WAITING)


def queue(run: RunData, name: str) -> Line:
    """`buffered_rollouts` or `in_flight_rollouts` as of each step, over minutes."""
    rows = metric(run, TRAINER, name)
    return thin(ascending(minutes(run, rows["t"]), rows["value"]))


def throughput(run: RunData) -> Mapping[str, Line]:
    """Stage → response tokens per second, over minutes, summed over its replicas."""
    edges = _edges(run)
    found: dict[str, Line] = {}
    for stage in ("generate", "score", "train") if len(edges) else ():
        totals = [metric(run, name, "total/tokens") for name in replicas(run, stage)]
        totals = [rows for rows in totals if len(rows["t"])]
        if totals:
            sums = sum((_at(edges, rows["t"], rows["value"]) for rows in totals), np.zeros(len(edges)))
            found[stage] = Line(_middles(run, edges), np.diff(sums) / np.diff(edges))
    return found


def stage_times(run: RunData) -> list[StageTime]:
    """By the signs of life: the whole run, earlier attempts too."""
    found = []
    for stage in STAGES:
        lives = [life["seconds"] for name, life in run.lives.items() if name.rpartition("-")[0] == stage]
        if lives:
            idle = sum(seconds.get("idle", 0.0) for seconds in lives)
            total = sum(sum(seconds.values()) for seconds in lives)
            busy = total - idle
            found.append(StageTime(stage=stage, replicas=len(lives), busy=busy / len(lives), idle=idle / len(lives)))
    return found


def overlap(run: RunData) -> Overlap | None:
    """Replicas of a stage work side by side, so a stage's time is their mean. None before the trainer did anything."""
    times = stage_times(run)
    wall = sum(time.busy + time.idle for time in times if time.stage == "train")
    longest = max(times, key=lambda time: time.busy, default=None)
    if longest is None or not longest.busy or not wall:
        return None
    busy = sum(time.busy for time in times)
    return Overlap(busy=busy, slowest=longest.stage, bound=busy / longest.busy, wall=wall, overlap=busy / wall)


def pushes(run: RunData) -> list[Era]:
    """How long weights took to reach all generators, by the transport that was in force."""
    rows = metric(run, SYNC, "push_seconds")
    eras = _eras(run.facts.attempts)
    place = np.searchsorted([few[0].t_started for few in eras], rows["t"], side="right") - 1
    return [
        Era(
            transport=few[0].transport,
            first=few[0].number,
            last=few[-1].number,
            seconds=thin(ascending(rows["policy_version"][place == number], rows["value"][place == number])),
        )
        for number, few in enumerate(eras)
    ]


def push_seconds(run: RunData) -> Line:
    """How long each policy version took from the handover until all generators had it, whatever the transport."""
    return thin(over_versions(run, SYNC, "push_seconds"))


def deliveries(run: RunData) -> Mapping[tuple[str, str], Line]:
    """(replica, route) → seconds from the handover of each policy version until that generator had loaded it."""
    found = {}
    for replica in replicas(run, "generate"):
        for name in sorted(run.metrics[replica]):
            if name.startswith("delivery/"):
                route = name.removeprefix("delivery/").removesuffix(_SECONDS)
                found[replica, route] = thin(over_versions(run, replica, name))
    return found


def mean_delivery(run: RunData) -> Line:
    """Seconds until a generator had loaded each policy version, mean of all."""
    names = [(replica, name) for replica in replicas(run, "generate") for name in run.metrics[replica]]
    lines = [over_versions(run, replica, name) for replica, name in names if name.startswith("delivery/")]
    return thin(averaged(lines))


def pauses(run: RunData) -> Mapping[str, Line]:
    """Replica → how long generation stood still for each policy version, seconds."""
    return {
        name: thin(over_versions(run, name, "pause_seconds"))
        for name in replicas(run, "generate")
        if "pause_seconds" in run.metrics[name]
    }


def mean_pause(run: RunData) -> Line:
    """How long generation stood still for each policy version, seconds, mean of all generators."""
    return thin(averaged([over_versions(run, name, "pause_seconds") for name in replicas(run, "generate")]))


def _edges(run: RunData) -> Floats:
    """[bins + 1] unix seconds; none where no stage measured its time."""
    start = run.facts.attempts[0].t_started
    ends = [
        rows["t"][-1]
        for stage in STAGES
        for replica in replicas(run, stage)
        for name, rows in run.metrics[replica].items()
        if (name.startswith(_LANE) or name == "total/tokens") and len(rows["t"])
    ]
    if not ends or max(ends) <= start:
        return np.empty(0)
    seconds, width = float(max(ends)) - start, _SHORTEST_BIN
    while seconds > width * MOST_INTERVALS:
        width *= 2
    edges: Floats = start + width * np.arange(np.ceil(seconds / width) + 1)
    # The last bin is not over yet.
    edges[-1] = start + seconds
    return edges


def _shares(run: RunData, replica: str, edges: Floats) -> dict[str, Floats]:
    """Kind → [bins] share of each bin."""
    named = {name: rows for name, rows in run.metrics[replica].items() if name.startswith(_LANE) and len(rows["t"])}
    if not named:
        return {}
    measured = np.concatenate([rows["t"] for rows in named.values()])
    ends, place = np.unique(measured, return_inverse=True)
    seconds = np.bincount(place, np.concatenate([rows["value"] for rows in named.values()]))
    # Two clocks: an interval may seem to begin a little before the one before it has ended.
    begins = np.maximum(ends - seconds, np.append(-np.inf, ends[:-1]))
    widths = np.diff(edges)
    found = {}
    stage = replica.rpartition("-")[0]
    for name, rows in sorted(named.items(), key=lambda item: _rank(item[0], stage)):
        by_interval = np.bincount(np.searchsorted(ends, rows["t"]), rows["value"], len(ends))
        so_far = np.cumsum(by_interval)
        before = so_far - by_interval
        times, sums = np.stack([begins, ends], 1).ravel(), np.stack([before, so_far], 1).ravel()
        kind = name.removeprefix(_LANE).removesuffix(_SECONDS)
        found[_SPOKEN.get(kind, kind)] = np.diff(np.interp(edges, times, sums)) / widths
    return found


def _rank(name: str, stage: str) -> tuple[bool, bool, str]:
    """What the stage is there for first, then its other work, then waiting."""
    own = f"{_LANE}{_OWN.get(stage, stage)}{_SECONDS}"
    return name.startswith(_LANE + WAITING), name != own, name


def _eras(attempts: Sequence[AttemptFacts]) -> list[list[AttemptFacts]]:
    found: list[list[AttemptFacts]] = []
    for attempt in attempts:
        if found and found[-1][-1].transport == attempt.transport:
            found[-1].append(attempt)
        else:
            found.append([attempt])
    return found


def _at(edges: Floats, t: Floats, totals: Floats) -> Floats:
    """A total at each edge; NaN behind its last measurement, for what came since is not known."""
    # The first row tells of the time before it.
    times, values = np.append(t[0] - _SHORTEST_BIN, t), np.append(0.0, totals)
    found: Floats = np.interp(edges, times, values, right=np.nan)
    return found


def _middles(run: RunData, edges: Floats) -> Floats:
    return minutes(run, (edges[:-1] + edges[1:]) / 2)


def _zeros(edges: Floats) -> Floats:
    return np.zeros(len(edges) - 1)
