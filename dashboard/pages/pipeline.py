"""The pipeline as a diagram: its stages from left to right with the queues between them, as of the run's last look."""

from dash import html
from dash.development.base_component import Component

from dashboard.queries.series import TRAINER, metric, replicas
from dashboard.queries.verdict.facts import IDLE_SECONDS, Facts, read_facts
from dashboard.queries.verdict.rules import BOUND, bottleneck, duration
from dashboard.read.model import RunData
from dashboard.read.tokens import visible
from millrace.runs.status import STAGES
from millrace.runtime.messages import LOADING, STARTING, STOPPED
from millrace.runtime.metrics import RECENT_STEPS

_TREND = 0.25
"""A queue grows or shrinks if its mean changes by more than this share from the previous steps to the newest."""


def picture(run: RunData) -> Component:
    facts = read_facts(run)
    names = {stage: [name for name in facts.doing if name.rpartition("-")[0] == stage] for stage in STAGES}
    limit = bottleneck(facts).cause
    generate, score, *teach, train, sync = (
        _stage(run, facts, stage, of_stage, is_bottleneck=BOUND.get(stage) == limit)
        for stage, of_stage in names.items()
        if of_stage or stage != "teach"
    )
    push = "–" if facts.push_seconds is None else f"{facts.push_seconds:.2g} s"
    parts = [
        *_bootstrap(run), generate, _edge(_queue(run, "in_flight"), "not scored"), score, *teach,
        _edge(_queue(run, "buffered"), "scored, not taken"), train, _edge(push, "to all generators"), sync,
    ]  # fmt: skip
    return html.Section(parts, className="pipeline", **{"aria-label": "pipeline"})


def _bootstrap(run: RunData) -> list[Component]:
    """Draws the progress of making the start model; without a number of steps, an indeterminate progress bar."""
    record = run.stage_status.get("bootstrap-0")
    if record is None or record.get("doing", STOPPED) == STOPPED or TRAINER in run.stage_status:
        return []
    if (run.status or {}).get("state", "running") != "running":
        return []
    step, most = record.get("step"), record.get("most_steps")
    steps = {"value": str(step), "max": str(most)} if isinstance(step, int) and isinstance(most, int) else {}
    bar = html.Progress(**steps, **{"aria-label": "steps of the warm start"})
    words = html.Span(visible(str(record["doing"])), className="none")
    return [html.Div([html.Strong("making the start model"), bar, words], className="stage bootstrap")]


def _stage(run: RunData, facts: Facts, stage: str, names: list[str], *, is_bottleneck: bool) -> Component:
    """Draws the replicas `names` of a stage together; the activity is that of the one that was silent longest."""
    slowest = max(names, key=lambda name: facts.silent.get(name, -1.0), default=None)
    doing = "not started" if slowest is None else facts.doing[slowest]
    silent, rate = facts.silent.get(slowest or ""), _tokens_per_second(run, stage)
    work = f"{1 - facts.idle[stage]:.0%} busy" if stage in facts.idle else "busy –"
    work += "" if rate is None else f", {rate:,.0f} tokens/s"
    heard = "" if slowest is None else "stopped" if silent is None else f"status {duration(silent)} ago"
    lines = [
        html.Strong(stage if len(names) < 2 else f"{stage} × {len(names)}"),
        *([html.Span("bottleneck", className="label")] if is_bottleneck else []),
        html.Span(doing if doing in (STARTING, LOADING, "not started") else work),
        html.Span(heard, className="none"),
    ]
    devices = {name: gpus for name in names if (gpus := run.stage_status[name].get("devices"))}
    if count := sum(map(len, devices.values())):
        each = "; ".join(f"{name}: {', '.join(gpus)}" for name, gpus in devices.items())
        lines.append(html.Span(f"{count} GPU{'s' * (count > 1)}", title=visible(each), className="none"))
    hue = {"--hue": f"var(--{stage})"}
    return html.Div(lines, className="stage bottleneck" if is_bottleneck else "stage", style=hue)


def _edge(what: str, label: str) -> Component:
    return html.Div([html.Span(f"{what} →"), html.Span(label, className="none")], className="edge")


def _queue(run: RunData, name: str) -> str:
    """Returns the rollouts in a queue of the ledger, with an arrow if it grows or shrinks."""
    rollouts = (run.status or {}).get("ledger", {}).get(name, {}).get("rollouts")
    values = metric(run, TRAINER, f"{name}_rollouts")["value"][-2 * RECENT_STEPS :]
    arrow = ""
    if len(values) == 2 * RECENT_STEPS:
        earlier, newest = float(values[:RECENT_STEPS].mean()), float(values[RECENT_STEPS:].mean())
        if abs(newest - earlier) > _TREND * max(earlier, 1.0):
            arrow = " ↑" if newest > earlier else " ↓"
    return "–" if rollouts is None else f"{rollouts:,}{arrow}"


def _tokens_per_second(run: RunData, stage: str) -> float | None:
    """Returns response tokens per second in the last two minutes, summed over replicas."""
    rates = []
    for name in replicas(run, stage):
        rows = metric(run, name, "total/tokens")
        now = rows["t"] > (rows["t"][-1] - IDLE_SECONDS if len(rows["t"]) else 0.0)
        t, totals = rows["t"][now], rows["value"][now]
        if len(t) > 1 and t[-1] > t[0]:
            rates.append(max(0.0, float((totals[-1] - totals[0]) / (t[-1] - t[0]))))
    return sum(rates) if rates else None
