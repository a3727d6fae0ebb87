"""Compares another reward's scores of stored trajectories with the original ones.

║ trajectories ║ part k ─┐
║ scores ║  old, part k ─┼─► row by row: agreed? rose? fell? ─► totals, by the prompts' source; every row that changed
║ scores ║  new, part k ─┘
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.replay.source_run import SourceRun
from storage import layout
from storage.schema import SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.stream import Part, StreamReader, UnreadablePart

CHANGED = pa.schema(
    [
        ("generator", pa.int32()),
        ("trajectory_row_id", pa.int64()),
        ("group_id", pa.int64()),
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("old_reward", pa.float32()),
        ("new_reward", pa.float32()),
    ]
)
"""A row per trajectory whose two rewards differ; null: that verifier failed."""
_COMPARED = ["source", "old_reward", "new_reward"]


def compare_scores(run: SourceRun, store: Store, reward: str, num_scorers: int) -> tuple[dict[str, Any], pa.Table]:
    """Compares the scores that `run` trained with and those by `reward` from `num_scorers` scorers in `store`.

    Returns totals as JSON, overall and by the source that the prompts name, with a sentence for each part that could
    not be read; and the rows that changed, as CHANGED.
    """
    unread: list[str] = []
    compared = [CHANGED.empty_table().select(_COMPARED)]
    changed = [CHANGED.empty_table()]
    for generator in range(run.config["generation"]["replicas"]):
        for tables in _aligned(run, store, generator, reward, num_scorers, unread):
            rows = _rows(generator, *tables)
            compared.append(rows.select(_COMPARED))
            changed.append(rows.filter(pa.array(~_agreed(*_rewards(rows)))))
    total = pa.concat_tables(compared)
    sources = sorted(total["source"].unique().to_pylist())
    totals = {
        "old_reward": run.config["scoring"]["reward"],
        "new_reward": reward,
        "total": _summary(total),
        "by_source": {source: _summary(total.filter(pc.equal(total["source"], source))) for source in sources},
        "unread": unread,
    }
    return totals, pa.concat_tables(changed)


def _rows(generator: int, trajectories: pa.Table, old: pa.Table, new: pa.Table) -> pa.Table:
    """All rows of a part, with the columns of CHANGED."""
    columns = {
        "generator": np.full(trajectories.num_rows, generator),
        "trajectory_row_id": trajectories["row_id"],
        "group_id": trajectories["group_id"],
        "prompt_id": trajectories["prompt_id"],
        "source": [str(json.loads(meta).get("source")) for meta in trajectories["meta"].to_pylist()],
        "old_reward": old["reward"],
        "new_reward": new["reward"],
    }
    return pa.table(columns).cast(CHANGED)


def _rewards(rows: pa.Table) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Old and new rewards, [rows] each; NaN where the verifier failed."""
    return rows["old_reward"].to_numpy().astype(np.float64), rows["new_reward"].to_numpy().astype(np.float64)


def _agreed(old: npt.NDArray[np.float64], new: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """[rows] whether both rewards are equal, or both verifiers failed."""
    agreed: npt.NDArray[np.bool_] = (old == new) | (np.isnan(old) & np.isnan(new))
    return agreed


def _summary(rows: pa.Table) -> dict[str, float | None]:
    """`agreement` is a share in [0, 1]; `shift` is new mean minus old mean where neither failed; None without rows."""
    old, new = _rewards(rows)
    agreed = int(_agreed(old, new).sum())
    shifts = (new - old)[~np.isnan(new - old)]
    return {
        "rows": len(old),
        "agreed": agreed,
        "rose": int((new > old).sum()),
        "fell": int((new < old).sum()),
        "old_failed": int(np.isnan(old).sum()),
        "new_failed": int(np.isnan(new).sum()),
        "agreement": agreed / len(old) if len(old) else None,
        "shift": float(shifts.mean()) if len(shifts) else None,
    }


def _aligned(
    run: SourceRun, store: Store, generator: int, reward: str, num_scorers: int, unread: list[str]
) -> Iterator[tuple[pa.Table, pa.Table, pa.Table]]:
    """Trajectories with both scores, part by part, up to the end of the shortest stream."""
    scoring = run.config["scoring"]
    columns = ["row_id", "group_id", "prompt_id", "meta"]
    trajectories = StreamReader(run.store, layout.trajectories(generator), TRAJECTORY, columns=columns)
    old = _scores(run.store, scoring["reward"], generator, scoring["replicas"])
    new = _scores(store, reward, generator, num_scorers)
    while True:
        scores = [readers[layout.scorer_of_part(trajectories.cursor.part, len(readers))] for readers in (old, new)]
        parts = [next(reader.each(), None) for reader in (trajectories, *scores)]
        if None in parts:
            return
        unread += [str(part.error) for part in parts if isinstance(part, UnreadablePart)]
        tables = [part.table for part in parts if isinstance(part, Part)]
        if len(tables) == len(parts):
            yield tables[0], tables[1], tables[2]


def _scores(store: Store, reward: str, generator: int, num_scorers: int) -> list[StreamReader]:
    paths = [layout.scores(reward, generator, scorer, num_scorers) for scorer in range(num_scorers)]
    return [StreamReader(store, path, SCORE, columns=["row_id", "reward"]) for path in paths]
