"""Takes out of a run what nobody needs any more; what is needed is never touched.

    trajectories   part 0 │ 1 │ 2 │ 3 │ 4 │ 5 …       each part goes together with its scores, oldest first
                   removed│ may go    │ needed        needed: by a kept checkpoint's cursors, or not scored yet
                          └── as far as the retention says
    logprobs       part 0 │ 1 │ 2 │ 3 │ 4 …           of the trainer: by the same retention; nobody needs them
    weights        anchor │ delta … │ anchor │ delta │ delta      a delta is of no use without all from its anchor on
                         may go     │ needed by the newest two
    checkpoints, promoted ones      the newest few of each stay, the last one always

    plan       one listing, then every log ─► what goes, and why
    carry out  <stream>/removed.json: "all parts before N are gone" ─► then the files

Records stay for ever, so the chain, the sums and the ledger stay whole. A crash while carrying out leaves files that
removed.json has given up already; the next gc deletes them.
"""

import heapq
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from millrace.care.contents import Contents, StoredFiles
from millrace.care.lanes import Lane, open_lanes
from millrace.care.strays import is_temporary, strays
from storage import layout
from storage.log import LogCursor
from storage.store import Store
from storage.stream import read_removed, write_removed

STRAY_SECONDS = 3600.0
"""A file that no record names is garbage once it is this old: no commit takes so long."""
KEPT_WEIGHTS = 2
"""The newest version, and the one before it, which a generator may be reading; and whatever these are deltas of."""

Kind = Literal["strays", "checkpoints", "weights", "promoted", "rows"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What a person wants to keep. With none of the first three, no rows are removed."""

    keep_age: float | None = None
    """Rows younger than this stay, seconds."""
    keep_versions: int | None = None
    """Rows that any of this many newest policy versions sampled, or whose step made one of them, stay."""
    max_bytes: int | None = None
    """The files of trajectories, of scores and of the trainer's log-probabilities may take this much together; more
    goes, oldest first, whatever the two above keep."""
    keep_checkpoints: int = 2
    """Checkpoints that can be resumed from afterwards, the newest ones, and as many promoted ones; at least 1."""

    def __post_init__(self) -> None:
        if self.keep_checkpoints < 1:
            raise ValueError("keep_checkpoints must be at least 1, or nothing could be resumed")


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One file that goes."""

    kind: Kind
    path: str
    """Relative to the run."""
    bytes: int
    reason: str


@dataclass(kw_only=True)
class Plan:
    """What gc would remove."""

    removals: list[Removal] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    """Log → how many of its first parts (or checkpoints) have no files from then on."""
    notes: list[str] = field(default_factory=list)
    """What the retention asked for and can't be."""

    def freed(self) -> Counter[Kind]:
        """Bytes by kind."""
        freed: Counter[Kind] = Counter()
        for removal in self.removals:
            freed[removal.kind] += removal.bytes
        return freed


def plan(store: Store, retention: Retention, *, now: float | None = None) -> Plan:
    """What may go at the time `now` (unix seconds; default: this moment); changes nothing.

    Raises RunMissing, and StreamCorrupt where a log is damaged: then nobody knows what is still needed.
    """
    now = time.time() if now is None else now
    contents = Contents(store)
    made = Plan()
    # Checkpoints first: a trainer that runs meanwhile only moves on, so what these need is more than will be needed.
    checkpoints, weights, promoted = (contents.checkpoints(log) for log in layout.FILE_LOGS)
    kept = _plan_files(made, contents, "checkpoints", layout.CHECKPOINTS, checkpoints, retention.keep_checkpoints)
    _plan_files(made, contents, "weights", layout.WEIGHTS, weights, _kept_weights(weights))
    _plan_files(made, contents, "promoted", layout.PROMOTED, promoted, retention.keep_checkpoints)
    lanes = open_lanes(contents, kept)
    _plan_rows(made, lanes, retention, newest=checkpoints[-1].step if checkpoints else 0, now=now)
    named = {ref.path for stored in (*checkpoints, *weights, *promoted) for ref in stored.files.values()}
    _plan_strays(made, contents, named, now)
    return made


def carry_out(store: Store, made: Plan) -> None:
    """Removes what the plan says; doing it twice, or again after a crash, is as good as once."""
    for log, parts in made.marks.items():
        if parts > read_removed(store, log):
            write_removed(store, log, parts=parts, why="millrace gc")
    for removal in made.removals:
        if is_temporary(removal.path):
            _delete_temporary(store, removal.path)
        else:
            store.delete(removal.path)


def _plan_files(
    made: Plan, contents: Contents, kind: Kind, log: str, stored: list[StoredFiles], keep: int
) -> list[StoredFiles]:
    """Plans the files of all but the newest `keep` records; those kept, oldest first.

    Records that name the same files are one: else two of them would push out the only other state to fall back on.
    """
    kept: list[StoredFiles] = []
    needed: list[frozenset[str]] = []
    for one in reversed(stored):
        files = frozenset(ref.path for ref in one.files.values())
        if files not in needed:
            if len(needed) == keep:
                break
            needed.append(files)
        kept.insert(0, one)
    in_use = frozenset().union(*needed)
    old = {ref.path: one for one in stored[: len(stored) - len(kept)] for ref in one.files.values()}
    for path, one in sorted(old.items()):
        if path not in in_use and path in contents.entries:
            reason = f"version {one.step}, {len(stored) - one.ordinal - 1} newer ones are there"
            made.removals.append(Removal(kind=kind, path=path, bytes=contents.entries[path].bytes, reason=reason))
    if len(stored) > len(kept):
        made.marks[log] = kept[0].ordinal
    return kept


def _kept_weights(weights: list[StoredFiles]) -> int:
    """How many of the newest versions stay: no kept delta may lose what it is told against."""
    kept = min(KEPT_WEIGHTS, len(weights))
    while kept < len(weights) and weights[-kept].record.body["state"].get("kind") == "delta":
        kept += 1
    return kept


def _plan_rows(made: Plan, lanes: list[Lane], retention: Retention, *, newest: int, now: float) -> None:
    ends = _ends(lanes, retention, newest=newest, now=now)
    for lane, end in zip(lanes, ends, strict=True):
        if end == 0:
            continue
        made.marks |= lane.marks(end)
        for part in lane.parts[:end]:
            reason = "removed before, in part" if part.ordinal < lane.removed else part.described()
            made.removals += [
                Removal(kind="rows", path=path, bytes=size, reason=reason) for path, size in part.files.items()
            ]
    if retention.max_bytes is not None:
        left = sum(part.bytes for lane, end in zip(lanes, ends, strict=True) for part in lane.parts[end:])
        if left > retention.max_bytes:
            made.notes.append(f"{left:,} bytes of rows are needed still, more than the {retention.max_bytes:,} allowed")


def _ends(lanes: list[Lane], retention: Retention, *, newest: int, now: float) -> list[int]:
    """For each lane, the part before which all parts go."""
    ends = [lane.removed for lane in lanes]
    if retention.keep_age is not None or retention.keep_versions is not None:
        for number, lane in enumerate(lanes):
            while ends[number] < lane.needed and _outlived(lane, ends[number], retention, newest=newest, now=now):
                ends[number] += 1
    if retention.max_bytes is not None:
        left = sum(part.bytes for lane, end in zip(lanes, ends, strict=True) for part in lane.parts[end:])
        fronts = [
            (lane.parts[ends[number]].t, number) for number, lane in enumerate(lanes) if ends[number] < lane.needed
        ]
        heapq.heapify(fronts)
        while fronts and left > retention.max_bytes:
            _, number = heapq.heappop(fronts)
            lane = lanes[number]
            left -= lane.parts[ends[number]].bytes
            ends[number] += 1
            if ends[number] < lane.needed:
                heapq.heappush(fronts, (lane.parts[ends[number]].t, number))
    return ends


def _outlived(lane: Lane, ordinal: int, retention: Retention, *, newest: int, now: float) -> bool:
    """Whether neither wish to keep it holds any more."""
    part = lane.parts[ordinal]
    young = retention.keep_age is not None and now - part.t < retention.keep_age
    recent = retention.keep_versions is not None and part.max_policy_version > newest - retention.keep_versions
    return not young and not recent


def _plan_strays(made: Plan, contents: Contents, named: set[str], now: float) -> None:
    heads = {log: LogCursor() for log in layout.FILE_LOGS}
    for stream in contents.streams:
        heads[stream.path] = LogCursor()
        for record, cursor in contents.log(stream.path):
            heads[stream.path] = cursor
            if record.kind == "data":
                named.add(f"{stream.path}/{record.seg}")
    for stray in strays(contents, named, heads):
        if stray.garbage and now - stray.t_modified > STRAY_SECONDS:
            made.removals.append(Removal(kind="strays", path=stray.path, bytes=stray.bytes, reason=stray.reason))


def _delete_temporary(store: Store, path: str) -> None:
    """What a store neither lists nor addresses, on a local one."""
    root = store.local_path("")
    if root is None:
        return
    found = root / path
    if found.is_dir():
        shutil.rmtree(found)
    else:
        found.unlink(missing_ok=True)
