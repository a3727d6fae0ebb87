"""The deployment `plan`: what a campaign will take, as artifacts of a flow run.

    config, request ─► plan ─► Markdown with a chart, a table of what was simulated, JSON

It starts no stage, and changes no run.
"""

import json
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact

from configs.requests import PlanRequest
from configs.schema import RunConfig
from flows.display.artifacts import show
from flows.planning.chart import chart
from flows.planning.formatting import as_markdown, table_rows
from flows.planning.prepare import answer


@flow(name="plan", flow_run_name="plan {config.name}", persist_result=False, validate_parameters=True)
def plan(config: RunConfig, request: PlanRequest) -> dict[str, Any]:
    """Plans a campaign. Returns everything as JSON, as `millrace plan --json` writes it.

    Args:
        config: Settings of the campaign.
        request: The machine, what may change, and what counts as best.

    Raises InputError, with one sentence, for a request that can't be answered.
    """
    made = answer(config, request)
    found = made.to_json()
    show(as_markdown(made, chart(made)), key="plan", description=f"What {made.base.name} will take")
    create_table_artifact(
        table_rows(made), key="plan-simulated", description="Every config that was simulated, best first"
    )
    show(
        f"```json\n{json.dumps(found, indent=1, ensure_ascii=False)}\n```\n", key="plan-json", description="Everything"
    )
    return found
