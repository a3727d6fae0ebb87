"""The deployment `gc`: frees space in a stored run, as `millrace gc` does. By default it only lists what would go."""

from pathlib import PurePosixPath
from typing import Annotated

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.display.artifacts import artifact_key
from millrace.maintenance.gc import KINDS, Retention, carry_out, plan
from storage.stores.factory import open_store

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]

_DAY_SECONDS, _GIGABYTE = 86400.0, 10**9


@flow(name="gc", flow_run_name="gc {run_url}", persist_result=False, validate_parameters=True)
def gc(
    run_url: str,
    keep_days: Positive | None = None,
    keep_versions: Count | None = None,
    max_gigabytes: Positive | None = None,
    keep_checkpoints: Count = 2,
    dry_run: bool = True,
) -> int:
    """Removes what a run no longer needs; no rows unless one of the first three limits is set. Returns the bytes freed.

    Args:
        run_url: Folder or URL of the run, root/run id; a relative path starts at the worker's checkout.
        keep_days: Keep rows younger than this many days.
        keep_versions: Keep rows that any of this many newest policy versions sampled.
        max_gigabytes: Limit for all rows together, GB; the oldest go first.
        keep_checkpoints: How many of the newest checkpoints to keep.
        dry_run: Only list what would be removed.

    Raises InputError if there is no run, and StreamCorrupt for a damaged log; then nothing is removed.
    """
    store = open_store(run_url)
    retention = Retention(
        keep_age=None if keep_days is None else keep_days * _DAY_SECONDS,
        keep_versions=keep_versions,
        max_bytes=None if max_gigabytes is None else int(max_gigabytes * _GIGABYTE),
        keep_checkpoints=keep_checkpoints,
    )
    made = plan(store, retention)
    if not dry_run:
        carry_out(store, made)
    what = "would be freed" if dry_run else "freed"
    for note in made.notes:
        get_run_logger().warning(note)
    files, freed = made.files(), made.freed()
    table = [{"what": kind, "files": files[kind], "bytes": freed[kind]} for kind in KINDS]
    key = artifact_key(PurePosixPath(store.url).name, "gc")
    create_table_artifact(table, key=key, description=f"What {what} of {store.url}")
    get_run_logger().info("%d files, %d bytes %s", len(made.removals), freed.total(), what)
    return freed.total()
