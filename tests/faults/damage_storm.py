"""Damages a stored run, one object at a time, and reads it back. Run as a process by its test: a parser may crash.

    damage_storm.py flips SEED COUNT    one bit of one object, COUNT times; sections, objects and bits drawn from SEED
    damage_storm.py cuts SEED           every shorter length of a part file, of records, files, a snapshot and a mark

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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.stores.dict_store import DictStore
from support.stores.faulty_store import flipped
from support.streams.stored_run import SECTIONS, kind_of, read_section, section_of, store_run

from storage import layout
from storage.errors import SchemaUnknown, StreamCorrupt

CUT_SECTIONS = (layout.metrics("score", 0), layout.CHECKPOINTS)
"""Short ones: each of their objects is cut at every length. The snapshot is cut where there is one."""

Damage = tuple[str, bytes, str]
"""Path of an object, its damaged bytes, what was done to it."""


def flips(store: DictStore, seed: int, count: int) -> Iterator[Damage]:
    """One flipped bit each. Small sections, rare kinds and short objects get as many as the others."""
    chooser = random.Random(f"{seed} flips")
    paths = {section: sorted(store.list(section), key=kind_of) for section in SECTIONS}
    kinds = {section: [list(same) for _, same in groupby(found, kind_of)] for section, found in paths.items()}
    for _ in range(count):
        path = chooser.choice(chooser.choice(kinds[chooser.choice(SECTIONS)]))
        bit = chooser.randrange(8 * len(store.objects[path]))
        yield path, flipped(store.objects[path], bit), f"bit {bit} flipped"


def cuts(store: DictStore) -> Iterator[Damage]:
    """Every shorter length of a part file, each record of its stream, each kind of checkpoint file, a hint, a mark."""
    metrics, checkpoints = CUT_SECTIONS
    chosen = [store.list(f"{metrics}/seg")[0], *store.list(f"{metrics}/log"), *store.list(f"{checkpoints}/data")[:3]]
    chosen += [store.list(f"{checkpoints}/log")[1], store.list(f"{checkpoints}/log")[-1]]
    chosen.append(next(path for path in store.list(layout.WEIGHTS) if kind_of(path) == "hint"))
    chosen.append(f"{checkpoints}/{layout.REMOVED}")
    for path in chosen:
        whole = bytes(store.objects[path])
        for length in range(len(whole)):
            yield path, whole[:length], f"cut to {length} of {len(whole)} bytes"


def judge(store: DictStore, path: str, expected: dict[str, Any]) -> str:
    """What becomes of a reader of the damaged object at `path`: `detected`, `unchanged`, or a sentence."""
    try:
        found = read_section(store, section_of(path))
    except StreamCorrupt as error:
        return "detected" if error.file == path else f"named {error.file}: {error}"
    except SchemaUnknown as error:
        return "detected" if path in str(error) else f"not named: {error}"
    except Exception as error:  # noqa: BLE001  whatever else comes out of a reader is what the storm looks for
        return f"raised {error!r}"
    return "unchanged" if found == expected else "gave other values"


def main(mode: str, seed: int, count: int) -> dict[str, Any]:
    store = store_run(seed)
    expected = {section: read_section(store, section) for section in SECTIONS}
    counts: Counter[str] = Counter()
    failures = []
    for path, damaged, what in flips(store, seed, count) if mode == "flips" else cuts(store):
        whole = store.objects[path]
        store.objects[path] = damaged
        verdict = judge(store, path, expected[section_of(path)])
        store.objects[path] = whole
        kind = kind_of(path)
        if verdict == ("unchanged" if kind == "hint" else "detected"):
            counts[f"{kind} {verdict}"] += 1
        else:
            failures.append(f"seed {seed}: {path}, {what}: {verdict}")
    return {"counts": counts, "failures": failures}


if __name__ == "__main__":
    faulthandler.enable()
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)))
