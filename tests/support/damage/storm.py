"""Damages a stored run, one object at a time, and reads it back. A separate process: an Arrow parser may crash.

    storm.py flips SEED COUNT    one bit of one object, COUNT times; sections, objects and bits drawn from SEED
    storm.py cuts SEED           every shorter length of a part file, of records, files, a snapshot and a mark

    one damage ──► read the object's section ──► the file is named            detected
                                             ├─► the same values as before    unchanged: allowed for hints alone
                                             └─► anything else                a failure, listed

Prints JSON: {"counts": {"record detected": n, …}, "failures": [sentence, …]}.
"""

import faulthandler
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

from support.stores.dict_store import DictStore
from support.stores.faulty_store import flipped
from support.streams import rows
from support.streams.numbered import numbered

from storage import layout
from storage.checkpoints import CheckpointWriter, load_file, read_latest
from storage.errors import SchemaUnknown, StreamCorrupt
from storage.schema import METRIC, SCORE, TRAJECTORY
from storage.streams.files import FileRef
from storage.streams.log import LogReader, backwards
from storage.streams.stream import StreamReader, StreamWriter, read_removed, write_removed

SCORES = layout.annotations("scores/exact_match", 0, 0, 1)
LONG, SHORT = layout.metrics("train", 0), layout.metrics("score", 0)
STREAMS = {layout.trajectories(0): TRAJECTORY, SCORES: SCORE, LONG: METRIC, SHORT: METRIC}
SECTIONS = (*STREAMS, layout.CHECKPOINTS, layout.WEIGHTS)
MANY = 70
"""More records than lie between two snapshots: in LONG and in the weights."""

Damage = tuple[str, bytes, str]
"""Path of an object, its damaged bytes, a description of the damage."""


def store_run(seed: int) -> DictStore:
    """A run with several parts in each stream, checkpoints with state and removed parts, and MANY weights."""
    store = DictStore()
    chooser = random.Random(seed)
    for writer in range(2):
        trajectories = StreamWriter(store, layout.trajectories(0), TRAJECTORY, "generate-0")
        scores = StreamWriter(store, SCORES, SCORE, "score-0")
        for _ in range(2 + writer):
            table = rows.trajectories(trajectories.rows, 8)
            trajectories.write(table, tokens=9, min_policy_version=3, max_policy_version=4)
            scores.write(rows.scores(scores.rows, 8), tokens=9)
        for path, parts in ((LONG, MANY // 2), (SHORT, 1)):
            metrics = StreamWriter(store, path, METRIC, "w")
            for _ in range(parts):
                metrics.write(numbered(metrics.rows, 1), tokens=0)
        checkpoints = CheckpointWriter(store, writer="trainer é")
        for step in range(3):
            files = {name: chooser.randbytes(chooser.randint(1, 300)) for name in ("model", "optimizer", "random")}
            state = {"intake": [{"seq": step, "lr": 1e-05, "name": "ü"}], "balance": {"trained": 0.1 + step}}
            checkpoints.commit(step, files, state)
        weights = CheckpointWriter(store, layout.WEIGHTS, writer="sync_weights")
        for version in range(MANY // 2):
            weights.commit(version, {"model": chooser.randbytes(20)}, {})
    write_removed(store, layout.CHECKPOINTS, parts=1, why="gc, which a crash kept from deleting the files")
    return store


def read_section(store: DictStore, section: str) -> dict[str, Any]:
    """Every value of one section. Raises StreamCorrupt or SchemaUnknown where a file is damaged."""
    head = LogReader.at_head(store, section).cursor
    values: dict[str, Any] = {
        "head": head,
        "records": list(backwards(store, section, head)),
        "removed": read_removed(store, section),
    }
    if section in STREAMS:
        reader = StreamReader(store, section, STREAMS[section])
        parts = [(part.record, part.table.to_pydict()) for part in iter(reader.next, None)]
        return {**values, "parts": parts, "cursor": reader.cursor}
    latest = read_latest(store, section)
    bodies = [record.body for record in iter(LogReader(store, section).next, None) if record.kind == "checkpoint"]
    refs = [FileRef(**ref) for body in bodies for ref in body["files"].values()]
    return {**values, "latest": latest, "bodies": bodies, "files": {ref.path: load_file(store, ref) for ref in refs}}


def section_of(path: str) -> str:
    return next(section for section in SECTIONS if PurePosixPath(path).is_relative_to(section))


def kind_of(path: str) -> str:
    """`record`, `part`, `file`, `mark` (of what gc removed) or `hint`."""
    folder = PurePosixPath(path).relative_to(section_of(path)).parts[0]
    return {"log": "record", "seg": "part", "data": "file", layout.REMOVED: "mark"}.get(folder, "hint")


def flips(store: DictStore, seed: int, count: int) -> Iterator[Damage]:
    """Flips one bit each. Small sections, rare kinds and short objects get as many as the others."""
    chooser = random.Random(f"{seed} flips")
    paths = {section: sorted(store.list(section), key=kind_of) for section in SECTIONS}
    kinds = {section: [list(same) for _, same in groupby(sorted_, kind_of)] for section, sorted_ in paths.items()}
    for _ in range(count):
        path = chooser.choice(chooser.choice(kinds[chooser.choice(SECTIONS)]))
        bit = chooser.randrange(8 * len(store.objects[path]))
        yield path, flipped(store.objects[path], bit), f"bit {bit} flipped"


def cuts(store: DictStore) -> Iterator[Damage]:
    """Every shorter length of a part file, each record of its stream, each kind of checkpoint file, a hint, a mark."""
    checkpoints = layout.CHECKPOINTS
    chosen = [store.list(f"{SHORT}/seg")[0], *store.list(f"{SHORT}/log"), *store.list(f"{checkpoints}/data")[:3]]
    chosen += [store.list(f"{checkpoints}/log")[1], store.list(f"{checkpoints}/log")[-1]]
    chosen.append(next(path for path in store.list(layout.WEIGHTS) if kind_of(path) == "hint"))
    chosen.append(f"{checkpoints}/{layout.REMOVED}")
    for path in chosen:
        whole = bytes(store.objects[path])
        for length in range(len(whole)):
            yield path, whole[:length], f"cut to {length} of {len(whole)} bytes"


def judge(store: DictStore, path: str, expected: dict[str, Any]) -> str:
    """Reads the section of the damaged object at `path`. Returns `detected`, `unchanged`, or a sentence."""
    try:
        values = read_section(store, section_of(path))
    except StreamCorrupt as error:
        return "detected" if error.file == path else f"named {error.file}: {error}"
    except SchemaUnknown as error:
        return "detected" if path in str(error) else f"not named: {error}"
    except Exception as error:  # noqa: BLE001  the storm looks for any other error that a reader raises
        return f"raised {error!r}"
    return "unchanged" if values == expected else "gave other values"


def main(mode: str, seed: int, count: int = 0) -> dict[str, Any]:
    store = store_run(seed)
    expected = {section: read_section(store, section) for section in SECTIONS}
    counts: Counter[str] = Counter()
    failures = []
    for path, damaged, description in flips(store, seed, count) if mode == "flips" else cuts(store):
        whole = store.objects[path]
        store.objects[path] = damaged
        verdict = judge(store, path, expected[section_of(path)])
        store.objects[path] = whole
        kind = kind_of(path)
        if verdict == ("unchanged" if kind == "hint" else "detected"):
            counts[f"{kind} {verdict}"] += 1
        else:
            failures.append(f"seed {seed}: {path}, {description}: {verdict}")
    return {"counts": counts, "failures": failures}


if __name__ == "__main__":
    faulthandler.enable()
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
