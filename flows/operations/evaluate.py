"""The deployment `evaluate`: the held-out accuracy of a stored run's latest checkpoint.

    run ─► latest attempt's config ─► stage evaluate ─► evaluations/<policy version>.json ─► a table in the UI

A version that was evaluated before is not evaluated again.
"""

import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact

from flows.display.artifacts import artifact_key
from flows.display.key_figures import accuracy_text
from millrace.runs.record import latest_attempt
from millrace.runs.status import StatusReader
from millrace.runtime.arguments import EVALUATE_AT_END, StageArguments, attempt_config
from storage.stores.factory import open_store
from storage.stores.memory import memory_folder
from tasks.fork_server import STAGES
from tasks.stages import evaluate as measure
from tasks.stop import STOP


@flow(name="evaluate", flow_run_name="evaluate {run_url}", persist_result=False, validate_parameters=True)
def evaluate(run_url: str) -> dict[str, Any]:
    """Measures the held-out accuracy of a run's latest checkpoint. The campaign may be running.

    Args:
        run_url: Folder or URL of the run, root/run id; a relative path is relative to the worker's checkout.

    Returns every evaluation of the run, by name, as in `millrace status`. Raises InputError if there is no run, or no
    checkpoint yet.
    """
    STOP.clear()
    store = open_store(run_url)
    attempt = latest_attempt(store)
    config = attempt_config(attempt)
    try:
        # Not the campaign's own folder, which may be in use.
        with tempfile.TemporaryDirectory(prefix="evaluate-", dir=memory_folder()) as folder:
            arguments = StageArguments(
                run_url=store.url, attempt=attempt.number, replica=EVALUATE_AT_END, handover=Path(folder)
            )
            measure(arguments, config.training.threads)
    finally:
        STOP.set()
        STAGES.close()
    found: dict[str, Any] = StatusReader(store).look()["eval"]
    key = artifact_key(PurePosixPath(store.url).name, "evaluations")
    create_table_artifact(table_rows(found), key=key, description=f"Held-out results of {store.url}")
    return found


def table_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Evaluations by name as table rows; an estimate is followed by its 95 % interval."""
    rows = []
    for name, result in found.items():
        row = {"evaluated": name, **result}
        if "accuracy_interval" in row:
            low, high = row.pop("accuracy_interval") or (None, None)
            row["accuracy"] = _cell({"value": row["accuracy"], "low": low, "high": high})
        if "pass_at" in row:
            row |= {f"pass@{k}": _cell(estimate) for k, estimate in row.pop("pass_at").items()}
            row["majority"] = _cell(row["majority"])
        rows.append(row)
    return rows


def _cell(estimate: dict[str, float | None]) -> str:
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    return accuracy_text(value, 4) if low is None else f"{value:.4f} [{low:.4f}, {high:.4f}]"
