"""The top of every page: title, the run's state, navigation with chart options, the verdict and read errors.

A run's home page also has the pipeline as a diagram: its stages from left to right with the queues between them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import dash_mantine_components as dmc
from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.pages.draw import facts, problem_box
from dashboard.queries.series import TRAINER, metric, replicas
from dashboard.queries.verdict.advice import judge
from dashboard.queries.verdict.facts import IDLE_SECONDS, Facts, read_facts
from dashboard.queries.verdict.rules import BOUND, Clause, bottleneck, duration, worst
from dashboard.read.model import RunData
from dashboard.read.tokens import visible
from dashboard.views.blocks import Chart, View, number
from dashboard.views.display import SMOOTHINGS, Display
from dashboard.views.home import HOME
from millrace.runs.status import STAGES
from millrace.runtime.messages import LOADING, STARTING, STOPPED
from millrace.runtime.metrics import RECENT_STEPS

ICONS = {"good": "✓", "warning": "▲", "bad": "✕", "neutral": "·"}
"""Icons show the level to readers who can't distinguish the colours."""
_TREND = 0.25
"""A queue grows or shrinks if its mean changes by more than this share from the previous steps to the newest."""
_SMALL = {"size": "compact-xs", "buttonProps": {"variant": "default"}, "className": "copy"}


def frame(
    at: address.Address, runs: Sequence[RunData], problems: Sequence[str], views: Sequence[View], url: str
) -> list[Component]:
    """Draws the top of the page at `at`; `runs` are its readable runs, `url` is the root of all runs."""
    title: list[Component] = [dcc.Link("Millrace", href=address.overview(), className="brand")]
    below: list[Component] = []
    shown = list(problems)
    if isinstance(at, address.RunPage):
        is_home = at.view == HOME.name
        if at.compared:
            chips = [dcc.Link(run_id, href=address.run(run_id), className="chip") for run_id in at.run_ids]
            title += [html.H1("Comparison"), html.Div(chips, className="facts")]
        else:
            title += [html.H1(at.run_ids[0], title=at.run_ids[0]), *map(run_facts, runs)]
        names = {run.info.run_id: f"{run.info.run_id}: " if at.compared else "" for run in runs}
        shown += [names[run.info.run_id] + sentence for run in runs for sentence in run.problems]
        links = html.Nav([_to_view(at, view) for view in views], **{"aria-label": "views"})
        here = next(view for view in views if view.name == at.view)
        below.append(html.Div([links, *_controls(at, here)], className="row views"))
        if not at.compared:
            below += [strip(run, brief=not is_home) for run in runs]
        if is_home:
            below += map(picture, runs)
    else:
        title += [html.H1("Runs"), html.Div(url, className="facts url")]
    return [html.Div(title, className="place"), *below, problem_box(shown)]


def run_facts(run: RunData) -> Component:
    """Draws the run's state in one line."""
    status, facts_of_run = run.status or {}, read_facts(run)
    named: dict[str, str] = {}
    state: list[Component] = []
    if status:
        state = [html.Span(status["state"], className=f"state {status['state']}")]
        named = {"step": f"{status['steps']} of {status['max_steps']}"}
    name = "loss" if facts_of_run.is_supervised else "reward"
    value = facts_of_run.loss if facts_of_run.is_supervised else facts_of_run.reward_mean
    named[f"{name}, last {RECENT_STEPS} steps"] = number(value, 3)
    started = max(attempt.t_started for attempt in run.info.attempts)
    newest = max((float(record["t"]) for record in run.stage_status.values()), default=started)
    moment = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(newest))
    state.append(html.Span(f"{duration(time.time() - newest)} ago", title=f"last status: {moment}", className="none"))
    return facts(named, state)


def _to_view(at: address.RunPage, view: View) -> Component:
    href = address.shown_as(replace(at, view=view.name), at.display)
    return dcc.Link(view.title, href=href, className="here" if view.name == at.view else "")


def _controls(at: address.RunPage, view: View) -> list[Component]:
    """Draws the options of a view's charts as links to the same page."""
    if not any(isinstance(block, Chart) for block in view.blocks):
        return []
    smoothings = {"off" if n == 1 else str(n): replace(at.display, smoothing=n) for n in SMOOTHINGS}
    axes = {"version": replace(at.display, by_time=False), "time": replace(at.display, by_time=True)}
    rows = [] if view.is_smooth else [_choice("Smoothing", smoothings, at)]
    return [html.Div([*rows, _choice("x axis", axes, at)], className="controls")]


def _choice(name: str, choices: Mapping[str, Display], at: address.RunPage) -> Component:
    links = [
        dcc.Link(label, href=address.shown_as(at, display), className="here" if display == at.display else "")
        for label, display in choices.items()
    ]
    return html.Div([html.Span(name, className="name"), *links], role="group", **{"aria-label": name})


def strip(run: RunData, *, brief: bool = False) -> Component:
    """Draws all clauses of the verdict and the advice; `brief`: the worst clause alone."""
    verdict = judge(read_facts(run))
    shown = [worst(verdict.clauses)] if brief else verdict.clauses
    clauses = [html.Li(_clause(clause, run.info.run_id)) for clause in shown]
    advice = [] if brief else [html.P([html.Strong("Advice: "), *with_commands(verdict.advice)], className="advice")]
    return html.Section([html.Ul(clauses, className="clauses"), *advice], **{"aria-label": "verdict"})


def with_commands(sentence: str) -> list[str | Component]:
    """Gives the command in a sentence, between its first and last backquote, a button that copies it."""
    before, quote, rest = sentence.partition("`")
    if not quote:
        return [sentence]
    command, _, after = rest.rpartition("`")
    button = dmc.CopyButton("Copy", value=command, copiedChildren="Copied", **_SMALL)
    return [before, html.Code(command), " ", button, after]


def _clause(clause: Clause, run_id: str) -> Component:
    icon = html.Span(
        ICONS[clause.level], className="icon", title=clause.level, role="img", **{"aria-label": clause.level}
    )
    href = f"{address.run(run_id, clause.view)}#{clause.block}"
    return dcc.Link([icon, clause.words], href=href, className=clause.level)


def picture(run: RunData) -> Component:
    """Draws the pipeline as of the run's last look."""
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
