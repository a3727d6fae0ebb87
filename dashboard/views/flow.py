"""The flow page: the stages' time, throughput, queues and weight transfers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import plotly.graph_objects as go

from dashboard.queries import flow as queries
from dashboard.queries.series import NO_LINE, TRAINER, ChartLine, averaged, is_measured, measured, thin
from dashboard.read.model import RunData
from dashboard.views.blocks import MINUTES, VERSIONS, Build, Chart, Table, View, lines, number, rows_per_run
from dashboard.views.colours import BLUE, ORANGE, SKY, colour_number, colour_of
from dashboard.views.figures import Series, tracks_chart
from dashboard.views.stragglers import IN_FLIGHT
from millrace.runtime.usage import CPU_CORES, GPU_BUSY_SHARE, GPU_MEMORY_BYTES, MEMORY_BYTES

_NO_TIME = "No stage has recorded its time yet; stages do so every two seconds."
_NO_PUSH = "No policy version has reached all generators yet."
_DASHES = ("solid", "dash", "dot")
"""Line styles of a stage's replicas, which share their colour."""
_NO_PAUSE = "No generator has loaded new weights yet."
_TIMES = ("stage", "replicas", "busy, s", "waiting, s", "busy share")
_OVERLAP = ("Σ busy, s", "longest", "bound = Σ ÷ longest", "trainer ran, s", "overlap = Σ ÷ that", "overlap ÷ bound")


def _tracks(runs: Sequence[RunData]) -> go.Figure:
    tracks = [
        replace(track, name=f"{run.info.run_id} {track.name}") if len(runs) > 1 else track
        for run in runs
        for track in [*queries.time_by_replica(run), *queries.occasional_tracks(run)]
    ]
    return tracks_chart(tracks, x=MINUTES, y="share of time", empty=_NO_TIME)


def _queues(run: RunData) -> list[Series]:
    return [
        Series(name="scored, not taken", line=queries.queue(run, "buffered_rollouts"), colour=BLUE),
        Series(name="made, not scored", line=queries.queue(run, "in_flight_rollouts"), colour=ORANGE),
    ]


def _by_stage(query: Callable[[RunData], Mapping[str, ChartLine]], y: str) -> Build:
    """Builds a chart with a line per stage over time; for several runs, of the trainer."""

    def single(run: RunData) -> list[Series]:
        return [Series(name=stage, line=line, colour=colour_of(stage)) for stage, line in query(run).items()]

    return lines(single, lambda run: query(run).get("train", NO_LINE), x=MINUTES, y=y, empty=_NO_TIME)


def _by_generator(query: Callable[[RunData], Mapping[str, ChartLine]]) -> Build:
    """Builds a chart of seconds per generator over versions; for several runs, of the mean."""

    def single(run: RunData) -> list[Series]:
        named = enumerate(query(run).items())
        return [Series(name=name, line=thin(line), colour=colour_number(i)) for i, (name, line) in named]

    return lines(single, lambda run: thin(averaged([*query(run).values()])), x=VERSIONS, y="seconds", empty=_NO_PAUSE)


def _pushes(run: RunData) -> list[Series]:
    named = queries.pushes(run).items()
    return [Series(name=name, line=line, colour=colour_of(name.partition(",")[0])) for name, line in named]


def _times(run: RunData) -> list[tuple[str, ...]]:
    return [
        (
            time.stage,
            str(time.replicas),
            number(time.busy, 1),
            number(time.idle, 1),
            number(100 * time.busy / (time.busy + time.idle), 0, " %") if time.busy + time.idle else "–",
        )
        for time in queries.stage_times(run)
    ]


def _overlap(run: RunData) -> list[tuple[str, ...]]:
    """Computes the overlap from the stages' mean times, as replicas run in parallel; empty before the trainer works."""
    times = {time.stage: time for time in queries.stage_times(run)}
    longest = max(times.values(), key=lambda time: time.busy, default=None)
    wall = times["train"].busy + times["train"].idle if "train" in times else 0.0
    if longest is None or not longest.busy or not wall:
        return []
    busy = sum(time.busy for time in times.values())
    bound, overlap = busy / longest.busy, busy / wall
    return [(number(busy, 1), longest.stage, number(bound), number(wall, 1), number(overlap), number(overlap / bound))]


def _overtaken(run: RunData) -> list[Series]:
    mean, largest = (measured(run, f"overtaken_groups_{name}") for name in ("mean", "max"))
    return [
        Series(name="mean", line=mean, colour=BLUE),
        Series(name="largest", line=largest, colour=SKY, dash="dot"),
    ]


def _usage(metric: str, y: str, unit: float = 1.0, whole: float | None = None) -> Build:
    """Builds a chart with a line per replica over time, in multiples of `unit`; for several runs, of the trainer."""

    def query(run: RunData) -> dict[str, ChartLine]:
        return {name: ChartLine(line.x, line.y / unit) for name, line in queries.usage(run, metric).items()}

    def single(run: RunData) -> list[Series]:
        return [
            Series(name=name, line=line, colour=colour_of(stage), dash=_DASHES[int(replica) % len(_DASHES)])
            for name, line in query(run).items()
            for stage, _, replica in [name.rpartition("-")]
        ]

    return lines(single, lambda run: query(run).get(TRAINER, NO_LINE), x=MINUTES, y=y, whole=whole)


def _is_used(metric: str) -> Callable[[RunData], bool]:
    return lambda run: bool(queries.usage(run, metric))


VIEW = View(
    name="flow",
    title="Flow",
    sentence="How each stage spends its time, the queues between stages, and the speed of tokens and weights.",
    blocks=(
        Chart(
            id="flow-tracks",
            title="Time by replica",
            sentence="One row per stage replica: the share of its time spent on each kind of work, and on waiting "
            "(grey). Empty intervals were not measured. The last rows show the bootstrap and the evaluations.",
            build=_tracks,
            wide=True,
        ),
        IN_FLIGHT,
        Chart(
            id="flow-queues",
            title="Queues",
            sentence="Committed rollouts that wait to be scored, or to be taken by the trainer, as of each step. For "
            "several runs: those scored and not taken.",
            build=lines(_queues, lambda run: queries.queue(run, "buffered_rollouts"), x=MINUTES, y="rollouts"),
        ),
        Chart(
            id="flow-overtaken",
            title="Overtaken groups",
            sentence="Number of later groups of the same generator that the trainer took before a group of this step; "
            "in the order of admission, they would have had to wait for it. For several runs: the largest.",
            build=lines(
                _overtaken, lambda run: measured(run, "overtaken_groups_max"), x=VERSIONS, y="groups taken before"
            ),
            requires=lambda run: is_measured(run, "overtaken_groups_max"),
        ),
        Chart(
            id="flow-throughput",
            title="Throughput",
            sentence="Response tokens generated, scored and trained per second, summed over replicas. For several "
            "runs: tokens trained.",
            build=_by_stage(queries.throughput, "response tokens/s"),
        ),
        Chart(
            id="flow-idle",
            title="Waiting",
            sentence="Share of each stage's time spent waiting for another stage: the stage that never waits is the "
            "bottleneck. For several runs: the trainer's share.",
            build=_by_stage(queries.idle, "share of time spent waiting"),
        ),
        Chart(
            id="flow-cpu",
            title="CPU",
            sentence="Cores that each stage replica keeps busy, including its child processes. For several runs: the "
            "trainer's.",
            build=_usage(CPU_CORES, "cores"),
        ),
        Chart(
            id="flow-memory",
            title="Memory",
            sentence="Resident memory of each stage replica and its child processes; shared memory counts for each. "
            "For several runs: the trainer's.",
            build=_usage(MEMORY_BYTES, "GiB", 1 << 30),
        ),
        Chart(
            id="flow-gpu",
            title="GPU",
            sentence="Share of the time in which the GPUs of each stage replica run a kernel, of any process: their "
            "mean. For several runs: the trainer's.",
            build=_usage(GPU_BUSY_SHARE, "share of time", whole=1.0),
            requires=_is_used(GPU_BUSY_SHARE),
        ),
        Chart(
            id="flow-gpu-memory",
            title="GPU memory",
            sentence="The most memory in use on the GPUs of each stage replica, by any process. For several "
            "runs: the trainer's.",
            build=_usage(GPU_MEMORY_BYTES, "GiB", 1 << 30),
            requires=_is_used(GPU_MEMORY_BYTES),
        ),
        Table(
            id="flow-times",
            title="Time by stage",
            sentence="In the whole run so far, mean over a stage's replicas.",
            build=lambda runs: rows_per_run(runs, _TIMES, _times),
        ),
        Table(
            id="flow-overlap",
            title="Overlap",
            sentence="The speed-up over running one stage at a time, and the speed-up that perfect overlap would give. "
            "Measured within this one run, where stages share the machine and slow each other down.",
            build=lambda runs: rows_per_run(runs, _OVERLAP, _overlap),
        ),
        Chart(
            id="flow-pushes",
            title="Weights: until all generators have them",
            sentence="Seconds from the trainer's handover of each policy version until every generator runs it, by "
            "transport.",
            build=lines(_pushes, queries.push_seconds, x=VERSIONS, y="seconds", empty=_NO_PUSH),
        ),
        Chart(
            id="flow-deliveries",
            title="Weights: until one generator has them",
            sentence="Seconds from the trainer's handover of each policy version until this generator has loaded it, "
            "and the route. For several runs: the mean.",
            build=_by_generator(queries.deliveries),
        ),
        Chart(
            id="flow-pauses",
            title="Weights: how long generation pauses",
            sentence="Seconds that each generator paused to load a policy version. For several runs: the mean.",
            build=_by_generator(queries.pauses),
        ),
    ),
)
