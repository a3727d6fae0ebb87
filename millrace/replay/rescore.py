"""Compares another reward's scores of stored trajectories with the original ones.

║ trajectories ║ part k ─┐
║ scores ║  old, part k ─┼─► row by row: agreed? rose? fell? ─► totals, by source; every row that changed
║ scores ║  new, part k ─┘
"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.replay.parts import ScoredParts, Scores
from millrace.replay.source_run import SourceRun
from millrace.runs.record import Attempt, latest_attempt
from millrace.runtime.arguments import attempt_config
from storage.errors import PartCorrupt, PartRemoved
from storage.stores.base import Store

CHANGED = pa.schema(
    [
        ("generator", pa.int32()),
        ("trajectory_row_id", pa.int64()),
        ("group_id", pa.int64()),
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("prompt_source", pa.string()),
        ("old_reward", pa.float32()),
        ("new_reward", pa.float32()),
    ]
)
"""A row per trajectory whose two rewards differ; null: that verifier failed."""


def compare_scores(run: SourceRun, store: Store) -> tuple[dict[str, Any], pa.Table]:
    """Compares the scores that `run` trained with and those of the replay in `store`.

    Returns totals as JSON, overall and by the run's sources, or if it has only one, by the source that the prompts
    name, with a sentence for each part that could not be read; and the rows that changed, as CHANGED. Parts without one
    of the scores are left out.
    """
    rescored = ScoredParts(run.store, Scores.of(store))
    columns = ["row_id", "group_id", "prompt_id", "source", "meta"]
    unread: list[str] = []
    tables = [CHANGED.empty_table()]
    for generator, records in enumerate(run.parts.records):
        for part in range(len(records)):
            try:
                trajectories = run.parts.trajectories(generator, part, columns)
                old, new = (parts.scores(generator, part, ["reward"]) for parts in (run.parts, rescored))
            except (PartCorrupt, PartRemoved) as error:
                unread.append(str(error))
                continue
            if old is not None and new is not None:
                rows = trajectories.table
                values = {
                    "generator": np.full(rows.num_rows, generator),
                    "trajectory_row_id": rows["row_id"],
                    "group_id": rows["group_id"],
                    "prompt_id": rows["prompt_id"],
                    "source": rows["source"],
                    "prompt_source": [str(json.loads(meta).get("source")) for meta in rows["meta"].to_pylist()],
                    "old_reward": old["reward"],
                    "new_reward": new["reward"],
                }
                tables.append(pa.table(values).cast(CHANGED))
    compared = pa.concat_tables(tables)
    column = "source" if pc.count_distinct(compared["source"]).as_py() > 1 else "prompt_source"
    sources = sorted(compared[column].unique().to_pylist())
    total, agreed = _summarize(compared)
    totals = {
        "old_reward": _reward_names(run.attempt),
        "new_reward": _reward_names(latest_attempt(store)),
        "total": total,
        "by_source": {name: _summarize(compared.filter(pc.equal(compared[column], name)))[0] for name in sources},
        "unread": unread,
    }
    return totals, compared.filter(pa.array(~agreed))


def _reward_names(attempt: Attempt) -> str:
    return ", ".join(dict.fromkeys(config.scoring.reward for config in attempt_config(attempt).by_source().values()))


def _summarize(rows: pa.Table) -> tuple[dict[str, float | None], npt.NDArray[np.bool_]]:
    """Totals, and [rows] whether both rewards are equal or both verifiers failed.

    `agreement` is a share in [0, 1]; `shift` is new mean minus old mean where neither failed; None without rows.
    """
    # NaN where the verifier failed.
    old, new = (rows[name].to_numpy().astype(np.float64) for name in ("old_reward", "new_reward"))
    agreed: npt.NDArray[np.bool_] = (old == new) | (np.isnan(old) & np.isnan(new))
    shifts = (new - old)[~np.isnan(new - old)]
    totals = {
        "rows": len(old),
        "agreed": int(agreed.sum()),
        "rose": int((new > old).sum()),
        "fell": int((new < old).sum()),
        "old_failed": int(np.isnan(old).sum()),
        "new_failed": int(np.isnan(new).sum()),
        "agreement": float(agreed.mean()) if len(old) else None,
        "shift": float(shifts.mean()) if len(shifts) else None,
    }
    return totals, agreed
