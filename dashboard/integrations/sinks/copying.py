"""Copies new metrics, evaluations, flow and texts of a run into a sink.

    ║ metrics/train-0 ║ ─► points, one per step ────────────┐
                          (and rollbacks)                   ├─► sink ─► MirrorState
    evaluations/*.json ─► points, one per version ──────────┤
    ║ metrics/<stage>-<r> ║ ─► `flow`: rates, idle shares ──┤
    attempts, trajectories ─► `texts`: configs, samples ────┘

MirrorState is saved after the points that it counts are written, so a mirror that is killed in between repeats some
points and omits none. Time metrics (`time/…`, `total/…`) are not copied; `flow` sums them by policy version.
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dashboard.integrations.sinks.flow import Flow
from dashboard.integrations.sinks.sink import Point, Sink, read_state
from dashboard.integrations.sinks.texts import Samples, config_texts, sampled_versions
from millrace.evaluation.results import HELD_OUT, Result, ResultsReader, measures_by_set
from millrace.rollouts.lineage import Survivors
from millrace.runs.history import TIME_METRICS
from millrace.runs.record import latest_attempt, read_run
from storage import layout
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.log import LogCursor
from storage.streams.stream import StreamReader, UnreadablePart

_PARTS_PER_BATCH = 256


class Mirror:
    """Copies one run into one sink incrementally. Raises InputError and RunMissing."""

    def __init__(self, store: Store, sink: Sink) -> None:
        self.sink = sink
        self.points = 0
        """Points written since this mirror was created."""
        self._store = store
        self._results = ResultsReader(store)
        self._opened = False
        self._state = read_state(sink.state_file, read_run(store))
        cursor = LogCursor.from_json(self._state.cursor) if self._state.cursor else None
        self._reader = StreamReader(store, layout.metrics("train", 0), METRIC, cursor)
        self._flow = Flow(store, latest_attempt(store).config, self._state.flow)
        self._samples: Samples | None = None

    @property
    def summary(self) -> str:
        """The number of points written, and the sink."""
        return f"{self.points} new points ─► {self.sink.name}"

    def copy(self) -> None:
        """Writes everything committed since the last call. Raises StreamCorrupt for a damaged record."""
        # Read before the metrics, so that all steps up to an evaluation's version are written first.
        evaluations = self._evaluations()
        while points := self._next_points():
            self._write_trained(points)
            self._save_state()
        if self._new(evaluations):
            self._open()
            # Opening a sink may have discarded evaluations from the state.
            new = self._new(evaluations)
            self._write(new)
            self._state.evaluations.update({str(point.policy_version): point.t for point in new})
            self._save_state()
        if self._opened:
            # After the trainer's points, which include rollbacks.
            if flow_points := self._flow.read_new():
                self._write(flow_points)
                self._state.flow = self._flow.to_json()
                self._save_state()
            if self.sink.takes_texts:
                self._copy_texts()

    def _copy_texts(self) -> None:
        state = self._state
        texts = [*config_texts(self._store, state.attempts)]
        attempts = state.attempts + len(texts)
        if versions := sampled_versions(state.sampled, state.newest):
            self._samples = self._samples or Samples(self._store)
            texts += self._samples.of_versions(versions)
        if texts or versions:
            self.sink.write_texts(texts)
            state.attempts, state.sampled = attempts, max([state.sampled, *versions])
            self._save_state()

    def close(self) -> None:
        if self._opened:
            self.sink.close()

    def _new(self, evaluations: Sequence[Point]) -> list[Point]:
        written = self._state.evaluations
        return [point for point in evaluations if written.get(str(point.policy_version)) != point.t]

    def _open(self) -> None:
        """Opens the sink before the first write, because W&B creates a folder whenever it is opened."""
        if not self._opened:
            self.sink.open(read_run(self._store), latest_attempt(self._store).config, self._state)
            self._opened = True

    def _next_points(self) -> list[Point]:
        """Reads the trainer's points from the next parts, in order; empty at the end of the stream."""
        points: list[Point] = []
        parts = 0
        for part in self._reader.each():
            if isinstance(part, UnreadablePart):
                print(f"millrace: skipped: {part.error}", file=sys.stderr)
                continue
            new = _points(part.table.to_pylist())
            points += new
            # Parts without points are not counted: an empty batch means the end of the stream.
            parts += bool(new)
            if parts == _PARTS_PER_BATCH:
                break
        return points

    def _evaluations(self) -> list[Point]:
        points = [
            Point(
                policy_version=result["policy_version"],
                incarnation=-1,
                t=result["t"],
                values=_accuracies(result),
            )
            for result in self._results.read()
            if result["accuracy"] is not None
        ]
        for error in self._results.damaged:
            print(f"millrace: skipped: {error}", file=sys.stderr)
        return points

    def _write_trained(self, points: Sequence[Point]) -> None:
        """Writes points, and rolls the sink back before versions that a newer incarnation repeats."""
        self._open()
        state = self._state
        survivors = Survivors({state.incarnation: state.newest})
        pending: list[Point] = []
        for point in points:
            if survivors.see(point.incarnation, point.policy_version, point.policy_version):
                self._write(pending)
                pending = []
                self.sink.roll_back(point.policy_version, state)
                state.discard_evaluations(point.policy_version)
                state.sampled = min(state.sampled, point.policy_version - 1)
            state.incarnation, state.newest = point.incarnation, survivors.newest[point.incarnation]
            pending.append(point)
        self._write(pending)

    def _write(self, points: Sequence[Point]) -> None:
        if points:
            self.sink.write(points, self._state)
            self.points += len(points)

    def _save_state(self) -> None:
        self.sink.flush()
        self._state.cursor = self._reader.cursor.to_json()
        self._state.save(self.sink.state_file)


def _accuracies(result: Result) -> dict[str, float]:
    """`evaluation/accuracy`, and that of each further set and source as `evaluation/accuracy/<set>`."""
    return {
        "evaluation/accuracy" if name == HELD_OUT else f"evaluation/accuracy/{name}": measures["accuracy"]
        for name, measures in measures_by_set(result).items()
        if measures["accuracy"] is not None
    }


def _points(rows: Sequence[dict[str, Any]]) -> list[Point]:
    """Makes one point of adjacent rows of the same version."""
    kept = [row for row in rows if not row["name"].startswith(TIME_METRICS)]
    groups = groupby(kept, lambda row: (row["incarnation"], row["policy_version"]))
    return [
        Point(
            policy_version=version,
            incarnation=incarnation,
            t=of_version[-1]["t"],
            values={f"train/{row['name']}": row["value"] for row in of_version},
        )
        for (incarnation, version), of_version in ((key, list(group)) for key, group in groups)
    ]
