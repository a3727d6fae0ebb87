"""The deployment `evaluate`: how good is a stored run's latest checkpoint, on prompts it was never trained on?

    run ─► latest attempt's config ─► stage evaluate ─► evaluations/<policy version>.json ─► a table in the UI

A version that has been measured before is not measured again.
"""

import tempfile
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact

from configs.schema import RunConfig
from millrace.run import latest_attempt
from millrace.stages.arguments import StageArguments
from millrace.status import StatusReader
from storage.factory import open_store
from storage.memory import memory_folder
from tasks.evaluate import evaluate as measure
from tasks.stop import STOP


@flow(name="evaluate", flow_run_name="evaluate {run_url}", persist_result=False, validate_parameters=True)
def evaluate(run_url: str) -> dict[str, Any]:
    """Measures the held-out accuracy of a run's latest checkpoint, also while the campaign runs.

    Args:
        run_url: Folder or URL of the run, root/run id; a relative path starts at the worker's checkout.

    Returns every evaluation of the run, by name, as `millrace status` does. Raises InputError where there is no run, or
    no checkpoint yet.
    """
    STOP.clear()
    store = open_store(run_url)
    attempt = latest_attempt(store)
    config = RunConfig.model_validate(attempt.config)
    try:
        # Not the campaign's own folder, which a running one is using.
        with tempfile.TemporaryDirectory(prefix="evaluate-", dir=memory_folder()) as folder:
            arguments = StageArguments(run_url=store.url, attempt=attempt.number, replica=0, handover=Path(folder))
            measure(arguments, config.training.threads, "end")
    finally:
        STOP.set()
    found: dict[str, Any] = StatusReader(store).look()["eval"]
    rows = [{"evaluated": name, **result} for name, result in found.items()]
    create_table_artifact(rows, key="evaluations", description=f"Held-out greedy accuracy of {store.url}")
    return found
