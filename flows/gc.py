"""The deployment `gc`: makes room in a stored run, as `millrace gc` does; by default it only says what would go."""

from typing import Annotated

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field

from millrace.care.gc import KINDS, Plan, Retention, carry_out, plan
from storage.factory import open_store

Days = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Gigabytes = Annotated[float, Field(gt=0)]

_DAY_SECONDS, _GIGABYTE = 86400.0, 10**9


@flow(name="gc", flow_run_name="gc {run_url}", persist_result=False, validate_parameters=True)
def gc(
    run_url: str,
    keep_days: Days | None = None,
    keep_versions: Count | None = None,
    max_gigabytes: Gigabytes | None = None,
    keep_checkpoints: Count = 2,
    dry_run: bool = True,
) -> int:
    """Removes what a run no longer needs; with none of the first three limits set, no rows. Returns the bytes freed.

    Args:
        run_url: Folder or URL of the run, root/run id; a relative path starts at the worker's checkout.
        keep_days: Rows younger than so many days stay.
        keep_versions: Rows that any of so many newest policy versions sampled stay.
        max_gigabytes: Then at most so much of rows stays, the newest; GB.
        keep_checkpoints: How many checkpoints stay, the newest ones.
        dry_run: Only say what would be removed.

    Raises InputError where there is no run, and StreamCorrupt where a log is damaged: then nothing is removed.
    """
    store = open_store(run_url)
    made = plan(
        store,
        Retention(
            keep_age=None if keep_days is None else keep_days * _DAY_SECONDS,
            keep_versions=keep_versions,
            max_bytes=None if max_gigabytes is None else int(max_gigabytes * _GIGABYTE),
            keep_checkpoints=keep_checkpoints,
        ),
    )
    if not dry_run:
        carry_out(store, made)
    what = "would be freed" if dry_run else "freed"
    for note in made.notes:
        get_run_logger().warning(note)
    create_table_artifact(_table(made), key="gc", description=f"What {what} of {store.url}")
    freed = made.freed().total()
    get_run_logger().info("%d files, %d bytes %s", len(made.removals), freed, what)
    return freed


def _table(made: Plan) -> list[dict[str, str | int]]:
    freed = made.freed()
    return [
        {"what": kind, "files": sum(removal.kind == kind for removal in made.removals), "bytes": freed[kind]}
        for kind in KINDS
    ]
