"""The pipeline as a diagram: its stages from left to right with the queues between them."""

from dash import html
from dash.development.base_component import Component

from dashboard.queries.pipeline import BootstrapNow, QueueNow, StageNow, pipeline_now
from dashboard.queries.verdict.rules import duration
from dashboard.read.model import RunData
from dashboard.read.tokens import visible
from millrace.runtime.messages import LOADING, STARTING

_ARROWS = {1: " ↑", 0: "", -1: " ↓"}


def picture(run: RunData) -> Component:
    now = pipeline_now(run)
    generate, score, *teach, train, sync = map(_stage, now.stages)
    push = "–" if now.push_seconds is None else f"{now.push_seconds:.2g} s"
    parts = [
        generate, _edge(_waiting(now.unscored), "not scored"), score, *teach,
        _edge(_waiting(now.scored), "scored, not taken"), train, _edge(push, "to all generators"), sync,
    ]  # fmt: skip
    if now.bootstrap is not None:
        parts.insert(0, _bootstrap(now.bootstrap))
    return html.Section(parts, className="pipeline", **{"aria-label": "pipeline"})


def _bootstrap(bootstrap: BootstrapNow) -> Component:
    """Draws the progress of making the start model; without a number of steps, an indeterminate progress bar."""
    steps = {} if bootstrap.step is None else {"value": str(bootstrap.step), "max": str(bootstrap.most_steps)}
    bar = html.Progress(**steps, **{"aria-label": "steps of the warm start"})
    words = html.Span(visible(bootstrap.doing), className="none")
    return html.Div([html.Strong("making the start model"), bar, words], className="stage bootstrap")


def _stage(stage: StageNow) -> Component:
    title = stage.name if stage.replicas < 2 else f"{stage.name} × {stage.replicas}"
    busy = "busy –" if stage.busy is None else f"{stage.busy:.0%} busy"
    tokens = "" if stage.tokens_per_second is None else f", {stage.tokens_per_second:,.0f} tokens/s"
    heard = "stopped" if stage.silent is None else f"status {duration(stage.silent)} ago"
    if stage.doing in (STARTING, LOADING, "not started"):
        busy, tokens = stage.doing, ""
    if stage.doing == "not started":
        heard = ""
    lines = [html.Strong(title), html.Span(busy + tokens), html.Span(heard, className="none")]
    if stage.devices:
        count = sum(len(devices) for devices in stage.devices.values())
        each = "; ".join(f"{name}: {', '.join(devices)}" for name, devices in stage.devices.items())
        lines.append(html.Span(f"{count} GPU{'s' * (count > 1)}", title=visible(each), className="none"))
    if stage.is_bottleneck:
        lines.insert(1, html.Span("bottleneck", className="label"))
    hue = {"--hue": f"var(--{stage.name})"}
    return html.Div(lines, className="stage bottleneck" if stage.is_bottleneck else "stage", style=hue)


def _edge(what: str, label: str) -> Component:
    return html.Div([html.Span(f"{what} →"), html.Span(label, className="none")], className="edge")


def _waiting(queue: QueueNow) -> str:
    return "–" if queue.rollouts is None else f"{queue.rollouts:,}{_ARROWS[queue.trend]}"
