"""The deployments `plan`, `evaluate` and `gc`.

plan       config, request ─► what a campaign will take: Markdown, and a table of the simulated configs
evaluate   evaluates a stored run's latest checkpoint
gc         frees space in a stored run
"""

import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

from configs.requests import PlanRequest
from configs.schema import RunConfig
from configs.section import Count, Positive
from flows.campaign.attempt import arguments_of
from flows.display.artifacts import artifact_key, show
from flows.display.key_figures import evaluation_rows
from flows.display.tables import for_markdown
from flows.operations.planning import COLUMNS, answer, headline, line, sections
from millrace.forking.stages import STAGES
from millrace.maintenance.gc import KINDS, Retention, carry_out
from millrace.maintenance.gc import plan as plan_removal
from millrace.runs.record import latest_attempt
from millrace.runs.status import StatusReader
from millrace.runtime.arguments import EVALUATE_AT_END, StageArguments, attempt_config
from storage.stores.factory import open_store
from storage.stores.memory import memory_folder
from tasks.device_leases import leased_devices
from tasks.stages import evaluate as evaluate_stage
from tasks.stop import STOP

_DAY_SECONDS, _GIGABYTE = 86400.0, 10**9


@flow(name="plan", flow_run_name="plan {config.name}", persist_result=False, validate_parameters=True)
def plan(config: RunConfig, request: PlanRequest) -> dict[str, Any]:
    """Plans a campaign. Starts no stage. Returns everything as JSON, as `millrace plan --json` writes it.

    Args:
        config: Settings of the campaign.
        request: The machine, what may change, and what counts as best.

    Raises InputError, with one sentence, for a request that can't be answered.
    """
    made = answer(config, request)
    markdown = "\n\n".join([f"# {headline(made)}", *map(for_markdown, sections(made)), ""])
    show(markdown, key="plan", description=f"What {config.name} will take")
    table = [
        {**dict(zip(COLUMNS, line(entry), strict=True)), "bottleneck": entry.bottleneck} for entry in made.simulated
    ]
    create_table_artifact(table, key="plan-simulated", description="Every config that was simulated, best first")
    return made.to_json()


@flow(name="evaluate", flow_run_name="evaluate {run_url}", persist_result=False)
def evaluate(run_url: str) -> dict[str, Any]:
    """Evaluates a run's latest checkpoint, unless that was done before. The campaign may be running.

    Args:
        run_url: Folder or URL of the run, root/run id; a relative path is relative to the worker's checkout.

    Returns every evaluation of the run, by name, as in `millrace status`. Raises InputError without a run or without a
    checkpoint.
    """
    STOP.clear()
    store = open_store(run_url)
    attempt = latest_attempt(store)
    try:
        # Not the campaign's folder, which may be in use.
        with tempfile.TemporaryDirectory(prefix="evaluate-", dir=memory_folder()) as folder:
            config, process = attempt_config(attempt), ("evaluate", EVALUATE_AT_END)
            arguments = StageArguments(run_url=store.url, attempt=attempt.number, replica=0, handover=Path(folder))
            with leased_devices(config, [process], store.url) as assignment:
                evaluate_stage(arguments_of(process, arguments, assignment), config.training.num_threads)
    finally:
        STOP.set()
        STAGES.close()
    status = StatusReader(store).look()
    key = artifact_key(PurePosixPath(store.url).name, "evaluations")
    create_table_artifact(
        evaluation_rows(status), key=key, description=f"Accuracy of each evaluated version of {store.url}"
    )
    evaluations: dict[str, Any] = status["eval"]
    return evaluations


@flow(name="gc", flow_run_name="gc {run_url}", persist_result=False)
def gc(
    run_url: str,
    keep_days: Positive | None = None,
    keep_versions: Count | None = None,
    max_gigabytes: Positive | None = None,
    keep_checkpoints: Count = 2,
    dry_run: bool = True,
) -> int:
    """Removes data that a run no longer needs; rows only if one of the first three limits is set. Returns bytes freed.

    Args:
        run_url: Folder or URL of the run, root/run id; a relative path starts at the worker's checkout.
        keep_days: Keep rows younger than this many days.
        keep_versions: Keep rows that any of this many newest policy versions sampled.
        max_gigabytes: Limit for all rows together, GB; the oldest go first.
        keep_checkpoints: How many of the newest checkpoints to keep.
        dry_run: Only list what would be removed.

    Raises InputError without a run, and StreamCorrupt for a damaged log; then nothing is removed.
    """
    store = open_store(run_url)
    retention = Retention(
        keep_age=None if keep_days is None else keep_days * _DAY_SECONDS,
        keep_versions=keep_versions,
        max_bytes=None if max_gigabytes is None else int(max_gigabytes * _GIGABYTE),
        keep_checkpoints=keep_checkpoints,
    )
    removal = plan_removal(store, retention)
    if not dry_run:
        carry_out(store, removal)
    outcome = "would be freed" if dry_run else "freed"
    for note in removal.notes:
        get_run_logger().warning(note)
    files, freed = removal.files(), removal.freed()
    table = [{"what": kind, "files": files[kind], "bytes": freed[kind]} for kind in KINDS]
    key = artifact_key(PurePosixPath(store.url).name, "gc")
    create_table_artifact(table, key=key, description=f"Space of {store.url} that {outcome}")
    get_run_logger().info("%d files, %d bytes %s", len(removal.removals), freed.total(), outcome)
    return freed.total()
