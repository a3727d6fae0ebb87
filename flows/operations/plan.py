"""The deployment `plan`: predicts time, memory and cost of a campaign, as artifacts of a flow run.

    config, request ─► plan ─► Markdown with a chart, a table of the simulated configs, JSON

It starts no stage, and changes no run.
"""

import json
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact

from configs.requests import PlanRequest
from configs.schema import RunConfig
from flows.display.artifacts import show
from flows.display.plots import line_chart
from flows.display.tables import Row, for_markdown
from flows.operations.planning import COLUMNS, answer, headline, line, sections
from millrace.planning.plan import Plan
from millrace.runs.history import Point


@flow(name="plan", flow_run_name="plan {config.name}", persist_result=False, validate_parameters=True)
def plan(config: RunConfig, request: PlanRequest) -> dict[str, Any]:
    """Plans a campaign. Returns everything as JSON, as `millrace plan --json` writes it.

    Args:
        config: Settings of the campaign.
        request: The machine, what may change, and what counts as best.

    Raises InputError, with one sentence, for a request that can't be answered.
    """
    made = answer(config, request)
    values = made.to_json()
    show(as_markdown(made), key="plan", description=f"What {made.base.name} will take")
    description = "Every config that was simulated, best first"
    create_table_artifact(table_rows(made), key="plan-simulated", description=description)
    text = json.dumps(values, indent=1, ensure_ascii=False)
    show(f"```json\n{text}\n```\n", key="plan-json", description="Everything")
    return values


def as_markdown(plan: Plan) -> str:
    """The plan for the Prefect UI, with a chart of seconds per step if GPUs can be divided in several ways."""
    figures, *tables = map(for_markdown, sections(plan))
    lines = splits(plan)
    chart = [line_chart("Seconds per step by split", lines, x_name="GPUs of the trainer")] if lines else []
    return "\n\n".join([f"# {headline(plan)}", figures, *chart, *tables, ""])


def table_rows(plan: Plan) -> list[Row]:
    """Every config that was simulated, as rows of a table."""
    return [
        {**dict(zip(COLUMNS, line(entry), strict=True)), "bottleneck": entry.bottleneck} for entry in plan.simulated
    ]


def splits(plan: Plan) -> dict[str, list[Point]]:
    """Lines of (GPUs of the trainer, seconds per step): one per size of a generator, and the winner's point.

    Each point is the fastest config simulated with that split, among those of the winner's mode and batch, whose steps
    are alike. Empty if GPUs are not divided, or all in one way.
    """
    winner = plan.chosen
    if plan.is_what_if or plan.gpus is None or winner.outcome is None:
        return {}
    seconds: dict[int, dict[float, float]] = {}
    for entry in plan.simulated:
        alike = (
            entry.config.pipeline.mode == winner.config.pipeline.mode
            and entry.config.training.groups_per_step == winner.config.training.groups_per_step
        )
        if entry.outcome is not None and alike:
            gpus, tensor = entry.split
            fastest = seconds.setdefault(tensor, {})
            fastest[gpus] = min(entry.outcome.step_seconds, fastest.get(gpus, entry.outcome.step_seconds))
    if len({gpus for fastest in seconds.values() for gpus in fastest}) < 2:
        return {}
    lines = {f"TP {tensor}": sorted(fastest.items()) for tensor, fastest in sorted(seconds.items())}
    return {**lines, "winner": [(float(winner.split[0]), winner.outcome.step_seconds)]}
