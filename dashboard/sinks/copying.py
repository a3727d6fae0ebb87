"""Copies what a run's trainer measured, and its evaluations, into a sink; each time only what is new.

    ║ metrics/train-0 ║ ─► points, a step each ──────┐
                          (rolled back? say so)      ├─► sink ─► Memory
    evaluations/*.json ─► points, a version each ────┘

Memory is saved once what it counts is written: a mirror that is killed in between writes some points twice, and leaves
none out. Measurements of time (`lane/…`, `total/…`) are not copied: they are of moments, not of policy versions.
"""

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dashboard.sinks.sink import Point, Sink, read_memory
from millrace.run import latest_attempt, read_run
from storage import layout
from storage.errors import NotInStore, PartCorrupt, PartRemoved
from storage.log import LogCursor
from storage.schema import METRIC
from storage.store import Store
from storage.stream import Part, StreamReader

_PARTS_AT_ONCE = 256
_OF_MOMENTS = ("lane/", "total/")


class Mirror:
    """Copies one run into one sink, again and again; each time only what is new. Raises InputError, RunMissing."""

    def __init__(self, store: Store, sink: Sink) -> None:
        self.sink = sink
        self.points = 0
        """Written since this mirror was made."""
        self._store = store
        self._opened = False
        self._memory = read_memory(sink.memory, read_run(store))
        cursor = LogCursor.from_json(self._memory.cursor) if self._memory.cursor else None
        self._reader = StreamReader(store, layout.metrics("train", 0), METRIC, cursor)

    def copy(self) -> None:
        """Write everything that was committed since the last time. Raises StreamCorrupt for a damaged record."""
        # Before the metrics, so that every step up to its version is written when an evaluation is.
        evaluations = _evaluations(self._store)
        while points := self._trained():
            self._write_trained(points)
            self._remember()
        if self._new(evaluations):
            self._open()
            # Asked again: a sink that is opened may have forgotten some.
            new = self._new(evaluations)
            self._write(new)
            self._memory.evaluations.update({str(point.policy_version): point.t for point in new})
            self._remember()

    def _new(self, evaluations: Sequence[Point]) -> list[Point]:
        written = self._memory.evaluations
        return [point for point in evaluations if written.get(str(point.policy_version)) != point.t]

    def _open(self) -> None:
        """Not before there is something to write: W&B would begin a folder at each start."""
        if not self._opened:
            self.sink.open(read_run(self._store), latest_attempt(self._store).config, self._memory)
            self._opened = True

    def close(self) -> None:
        """Nothing more is copied."""
        if self._opened:
            self.sink.close()

    def _trained(self) -> list[Point]:
        """The trainer's points of the next few parts, in order; none where there are no more parts."""
        points: list[Point] = []
        for _ in range(_PARTS_AT_ONCE):
            part = self._next()
            if part is None:
                break
            points += _points(part.table.to_pylist())
        return points

    def _next(self) -> Part | None:
        """The next part that holds points and can be read."""
        while True:
            try:
                part = self._reader.next()
            except (PartCorrupt, PartRemoved) as error:
                print(f"millrace: left out: {error}", file=sys.stderr)
                self._reader.next_record()
                continue
            if part is None or any(not name.startswith(_OF_MOMENTS) for name in part.table["name"].to_pylist()):
                return part

    def _write_trained(self, points: Sequence[Point]) -> None:
        """Write them, and say so where a newer incarnation of the trainer repeats versions that were written before."""
        self._open()
        memory = self._memory
        together: list[Point] = []
        for point in points:
            if point.incarnation > memory.incarnation:
                if point.policy_version <= memory.newest:
                    self._write(together)
                    together = []
                    self.sink.roll_back(point.policy_version, memory)
                    memory.forget_evaluations(point.policy_version)
                memory.incarnation, memory.newest = point.incarnation, point.policy_version
            memory.newest = max(memory.newest, point.policy_version)
            together.append(point)
        self._write(together)

    def _write(self, points: Sequence[Point]) -> None:
        if points:
            self.sink.write(points, self._memory)
            self.points += len(points)

    def _remember(self) -> None:
        self.sink.flush()
        self._memory.cursor = self._reader.cursor.to_json()
        self._memory.save(self.sink.memory)


def _points(rows: Sequence[dict[str, Any]]) -> list[Point]:
    """One of neighbouring rows that tell of the same version."""
    kept = [row for row in rows if not row["name"].startswith(_OF_MOMENTS)]
    return [
        Point(
            policy_version=version,
            incarnation=incarnation,
            t=some[-1]["t"],
            values={f"train/{row['name']}": row["value"] for row in some},
        )
        for (incarnation, version), of_version in groupby(kept, lambda row: (row["incarnation"], row["policy_version"]))
        if (some := list(of_version))
    ]


def _evaluations(store: Store) -> list[Point]:
    points = []
    for path in store.list(layout.EVALUATIONS):
        try:
            result = json.loads(bytes(store.get(path)))
            points.append(
                Point(
                    policy_version=int(result["policy_version"]),
                    incarnation=-1,
                    t=float(result["t"]),
                    values={"evaluation/accuracy": float(result["accuracy"])},
                )
            )
        except NotInStore:
            continue
        except (ValueError, KeyError, TypeError) as error:
            print(f"millrace: left out: {path}: not the result of an evaluation: {error}", file=sys.stderr)
    return points
