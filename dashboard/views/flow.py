"""What the stages do with their time, how fast tokens move, and how weights travel."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from dashboard.blocks import Chart, Rows, Table, View
from dashboard.colours import BLUE, ORANGE, colour_number, colour_of
from dashboard.data import RunData
from dashboard.figures import Lane, Series, lanes_chart, line_chart
from dashboard.queries import flow as queries
from dashboard.queries.series import NO_LINE, Line
from dashboard.views.several import MINUTES, NO_STEP, VERSIONS, line_a_run, number, rows_a_run

_NO_LANES = "No stage has measured its time yet: each does so every two seconds."
_NO_PUSH = "No policy version has reached all generators yet."
_NO_PAUSE = "No generator has measured a change of weights yet."
_TIMES = ("stage", "replicas", "busy, s", "waiting, s", "busy share")
_OVERLAP = ("Σ busy, s", "longest", "bound = Σ ÷ longest", "trainer ran, s", "overlap = Σ ÷ that", "overlap ÷ bound")


def _lanes(runs: Sequence[RunData]) -> go.Figure:
    lanes = [
        Lane(name=f"{run.facts.run_id} {one.name}" if len(runs) > 1 else one.name, edges=one.edges, shares=one.shares)
        for run in runs
        for one in queries.lanes(run)
    ]
    return lanes_chart(lanes, x=MINUTES, y="share of time", empty=_NO_LANES)


def _queues(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, lambda run: queries.queue(run, "buffered_rollouts"))
    else:
        series = [
            Series(name=name, x=line.x, y=line.y, colour=colour)
            for name, metric, colour in (
                ("scored, not taken", "buffered_rollouts", BLUE),
                ("made, not scored", "in_flight_rollouts", ORANGE),
            )
            for line in (queries.queue(runs[0], metric),)
        ]
    return line_chart(series, x=MINUTES, y="rollouts", empty=NO_STEP, from_zero=True)


def _throughput(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, lambda run: queries.throughput(run).get("train", NO_LINE))
    else:
        series = _by_stage(queries.throughput(runs[0]))
    return line_chart(series, x=MINUTES, y="response tokens/s", empty=_NO_LANES, from_zero=True)


def _idle(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, lambda run: queries.idle(run).get("train", NO_LINE))
    else:
        series = _by_stage(queries.idle(runs[0]))
    return line_chart(series, x=MINUTES, y="share of time spent waiting", empty=_NO_LANES, from_zero=True)


def _by_stage(lines: Mapping[str, Line]) -> list[Series]:
    return [Series(name=stage, x=line.x, y=line.y, colour=colour_of(stage)) for stage, line in lines.items()]


def _times(runs: Sequence[RunData]) -> Rows:
    return rows_a_run(
        runs,
        _TIMES,
        lambda run: [
            (
                time.stage,
                str(time.replicas),
                number(time.busy, 1),
                number(time.idle, 1),
                number(100 * time.busy / (time.busy + time.idle), 0, " %") if time.busy + time.idle else "–",
            )
            for time in queries.stage_times(run)
        ],
    )


def _overlap(runs: Sequence[RunData]) -> Rows:
    return rows_a_run(
        runs,
        _OVERLAP,
        lambda run: [
            (
                number(found.busy, 1),
                found.slowest,
                number(found.bound),
                number(found.wall, 1),
                number(found.overlap),
                number(found.share),
            )
            for found in (queries.overlap(run),)
            if found is not None
        ],
    )


def _pushes(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, queries.push_seconds)
    else:
        series = [
            Series(name=_era(era), x=era.seconds.x, y=era.seconds.y, colour=colour_of(era.transport))
            for era in queries.pushes(runs[0])
        ]
    return line_chart(series, x=VERSIONS, y="seconds", empty=_NO_PUSH, from_zero=True)


def _era(era: queries.Era) -> str:
    return f"{era.transport}, attempt {era.first}" + (f" to {era.last}" if era.last > era.first else "")


def _deliveries(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, queries.mean_delivery)
    else:
        series = [
            Series(name=f"{replica} by {route}", x=line.x, y=line.y, colour=colour_number(number))
            for number, ((replica, route), line) in enumerate(queries.deliveries(runs[0]).items())
        ]
    return line_chart(series, x=VERSIONS, y="seconds", empty=_NO_PAUSE, from_zero=True)


def _pauses(runs: Sequence[RunData]) -> go.Figure:
    if len(runs) > 1:
        series = line_a_run(runs, queries.mean_pause)
    else:
        series = [
            Series(name=replica, x=line.x, y=line.y, colour=colour_number(number))
            for number, (replica, line) in enumerate(queries.pauses(runs[0]).items())
        ]
    return line_chart(series, x=VERSIONS, y="seconds", empty=_NO_PAUSE, from_zero=True)


VIEW = View(
    name="flow",
    title="Flow",
    sentence="What each stage's time goes into, what stands in between, and how fast tokens and weights move.",
    blocks=(
        Chart(
            id="flow-lanes",
            title="Lanes",
            sentence="A band for each stage replica: the share of its time that each kind of work took, and what it "
            "waited for (grey). What is left empty was not measured.",
            build=_lanes,
            wide=True,
        ),
        Chart(
            id="flow-queues",
            title="Queues",
            sentence="Rollouts that are committed and wait: to be scored, or to be taken by the trainer. As of each "
            "step. Of several runs: those scored and not taken.",
            build=_queues,
        ),
        Chart(
            id="flow-throughput",
            title="Throughput",
            sentence="Response tokens per second that were generated, scored and trained, all replicas together. Of "
            "several runs: those trained.",
            build=_throughput,
        ),
        Chart(
            id="flow-idle",
            title="Waiting",
            sentence="Share of each stage's time that it waited for another one: the stage that never waits is the "
            "bottleneck. Of several runs: that of the trainer.",
            build=_idle,
        ),
        Table(
            id="flow-times",
            title="Time by stage",
            sentence="Over the whole run so far, the mean of a stage's replicas.",
            build=_times,
        ),
        Table(
            id="flow-overlap",
            title="Overlap",
            sentence="How much faster than one stage at a time, beside how much faster perfect overlap would be. "
            "Measured within this one run, where stages share the machine and disturb each other.",
            build=_overlap,
        ),
        Chart(
            id="flow-pushes",
            title="Weights: until all generators have them",
            sentence="Seconds from the trainer's handover of each policy version until every generator runs it, by "
            "transport.",
            build=_pushes,
        ),
        Chart(
            id="flow-deliveries",
            title="Weights: until one generator has them",
            sentence="Seconds from the trainer's handover of each policy version until this generator has loaded it, "
            "and by which way it came. Of several runs: the mean.",
            build=_deliveries,
        ),
        Chart(
            id="flow-pauses",
            title="Weights: how long generation stands still",
            sentence="Seconds that each generator paused to load a policy version. Of several runs: the mean.",
            build=_pauses,
        ),
    ),
)
