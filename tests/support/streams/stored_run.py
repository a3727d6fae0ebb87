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

from support.stores.dict_store import DictStore
from support.streams import rows
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
MANY = 70
"""More records than lie between two snapshots."""


def store_run(seed: int) -> DictStore:
    """A run of 5 parts of trajectories and their scores, metrics, 6 checkpoints and MANY weights; two writers each."""
    store = DictStore()
    chooser = random.Random(seed)
    for writer in range(2):
        _store_rollouts(store, parts=2 + writer)
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


def _store_rollouts(store: Store, parts: int) -> None:
    trajectories = StreamWriter(store, layout.trajectories(0), TRAJECTORY, "generate-0")
    scores = StreamWriter(store, SCORES, SCORE, "score-0")
    for _ in range(parts):
        trajectories.write(
            rows.trajectories(trajectories.rows, 8), tokens=9, min_policy_version=3, max_policy_version=4
        )
        scores.write(rows.scores(scores.rows, 8), tokens=9)


def _store_metrics(store: Store, path: str, parts: int) -> None:
    writer = StreamWriter(store, path, METRIC, "w")
    for _ in range(parts):
        writer.write(numbered(writer.rows, 1), tokens=0)
