"""A small stored run in memory, and the reading of all of it: what came back, or which file was named as damaged.

store_run ──► DictStore ──► a test damages one object ──► read_section ──► equal to before? damage named?

section                    holds                                                 read through
streams/trajectories/0     records, part files                                   StreamReader
streams/scores/…           records, part files                                   StreamReader
streams/metrics/train-0    more records than one snapshot passes, part files     StreamReader
streams/metrics/score-0    two short parts                                       StreamReader
checkpoints                records with state, several files each, a mark        read_latest, load_file, read_removed
weights                    more records than one snapshot passes, one file each  read_latest, load_file
each of them               its log                                               from the start, the head, backwards
"""

import random
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from support.stores.dict_store import DictStore
from support.streams.numbered import numbered

from storage import layout
from storage.checkpoints import CheckpointWriter, load_file, read_latest
from storage.schema import METRIC, SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.files import FileRef
from storage.streams.log import LogReader, backwards
from storage.streams.stream import StreamReader, StreamWriter, read_removed, write_removed

SCORES = layout.scores("exact_match", 0, 0, 1)
STREAMS = {
    layout.trajectories(0): TRAJECTORY,
    SCORES: SCORE,
    layout.metrics("train", 0): METRIC,
    layout.metrics("score", 0): METRIC,
}
LOGS = (layout.CHECKPOINTS, layout.WEIGHTS)
SECTIONS = (*STREAMS, *LOGS)
GROUP_SIZE = 4
MANY = 70
"""More records than lie between two snapshots."""


def store_run(seed: int) -> DictStore:
    """A run of 5 parts of trajectories and their scores, metrics, 6 checkpoints and MANY weights; two writers each."""
    store = DictStore()
    chooser = random.Random(seed)
    for writer in range(2):
        _store_rollouts(store, chooser, parts=2 + writer)
        _store_metrics(store, layout.metrics("train", 0), parts=MANY // 2)
        _store_metrics(store, layout.metrics("score", 0), parts=1)
        checkpoints = CheckpointWriter(store, writer="trainer é")
        weights = CheckpointWriter(store, layout.WEIGHTS, writer="sync_weights")
        for step in range(3):
            files = {name: chooser.randbytes(chooser.randint(1, 300)) for name in ("model", "optimizer", "random")}
            state = {"intake": [{"seq": step, "lr": 1e-05, "name": "ü"}], "balance": {"trained": 0.1 + step}}
            checkpoints.commit(step, files, state)
        for version in range(MANY // 2):
            weights.commit(version, {"model": chooser.randbytes(20)}, {})
    write_removed(store, layout.CHECKPOINTS, parts=1, why="gc, which a crash kept from deleting the files")
    return store


def read_section(store: Store, section: str) -> dict[str, Any]:
    """Every value of one section. Raises StreamCorrupt or SchemaUnknown where a file is damaged."""
    head = LogReader.at_head(store, section).cursor
    records = list(backwards(store, section, head))
    values = _read_stream(store, section) if section in STREAMS else _read_files(store, section)
    return {"head": head, "records": records, "removed": read_removed(store, section), **values}


def section_of(path: str) -> str:
    """The section that the object at `path` is read with."""
    return next(section for section in SECTIONS if PurePosixPath(path).is_relative_to(section))


def kind_of(path: str) -> str:
    """What the object at `path` is: record, part, file, mark (of what gc removed) or hint."""
    folder = PurePosixPath(path).relative_to(section_of(path)).parts[0]
    return {"log": "record", "seg": "part", "data": "file", layout.REMOVED: "mark"}.get(folder, "hint")


def _read_stream(store: Store, path: str) -> dict[str, Any]:
    reader = StreamReader(store, path, STREAMS[path])
    parts = [(part.record, part.table.to_pydict()) for part in iter(reader.next, None)]
    return {"parts": parts, "cursor": reader.cursor}


def _read_files(store: Store, root: str) -> dict[str, Any]:
    latest = read_latest(store, root)
    bodies = [record.body for record in iter(LogReader(store, root).next, None) if record.kind == "checkpoint"]
    refs = [FileRef(**ref) for body in bodies for ref in body["files"].values()]
    return {"latest": latest, "bodies": bodies, "files": {ref.path: load_file(store, ref) for ref in refs}}


def _store_rollouts(store: Store, chooser: random.Random, parts: int) -> None:
    rows = 2 * GROUP_SIZE
    trajectories = StreamWriter(store, layout.trajectories(0), TRAJECTORY, "generate-0")
    scores = StreamWriter(store, SCORES, SCORE, "score-0")
    for _ in range(parts):
        table = _trajectories(trajectories.rows, rows, chooser)
        tokens = sum(len(response) for response in table["response_tokens"].to_pylist())
        trajectories.write(table, tokens=tokens, min_policy_version=3, max_policy_version=4)
        scores.write(_scores(table["row_id"].to_pylist()), tokens=tokens)


def _store_metrics(store: Store, path: str, parts: int) -> None:
    writer = StreamWriter(store, path, METRIC, "w")
    for _ in range(parts):
        writer.write(numbered(writer.rows, 1), tokens=0)


def _trajectories(first: int, rows: int, chooser: random.Random) -> pa.Table:
    return pa.Table.from_pylist([_trajectory(row, chooser) for row in range(first, first + rows)], schema=TRAJECTORY)


def _trajectory(row: int, chooser: random.Random) -> dict[str, Any]:
    tokens = [chooser.randrange(50) for _ in range(chooser.randint(2, 12))]
    return {
        "row_id": row,
        "group_id": row // GROUP_SIZE,
        "prompt_id": f"prompt-{row // GROUP_SIZE}",
        "sample_index": row % GROUP_SIZE,
        "prompt_tokens": [1, 2, 3],
        "response_tokens": tokens,
        "rollout_logprobs": [-chooser.random() for _ in tokens],
        "span_versions": [3, 4],
        "span_starts": [0, 1],
        "min_policy_version": 3,
        "max_policy_version": 4,
        "incarnation": 0,
        "loss_mask": [1 for _ in tokens],
        "finish_reason": "stop",
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 12,
        "generator": 0,
        "epoch": 0,
        "seed": chooser.randrange(2**62),
        "t_admitted": row + 0.25,
        "t_started": row + 0.5,
        "t_finished": row + 0.75,
        "meta": f'{{"answer": "{row}"}}',
        "message_roles": [],
        "message_starts": [],
        "kept_tokens": [],
        "kept_counts": [],
        "routed_experts": [],
    }


def _scores(row_ids: list[int]) -> pa.Table:
    rows = [
        {
            "row_id": row,
            "reward": None if row % 3 == 2 else row / 8,
            "components": "{}",
            "status": "timeout" if row % 3 == 2 else "ok",
            "error": "took longer than 1 s" if row % 3 == 2 else None,
            "verifier_version": "exact_match-1",
            "seconds": 0.125,
        }
        for row in row_ids
    ]
    return pa.Table.from_pylist(rows, schema=SCORE)
