"""Idle share and tokens per second of each stage replica at each policy version.

    ║ metrics/<stage>-<r> ║ ─► time/…, total/tokens ─► summed while the version is the same ─► a point once it changes

The sums are part of the state, so a restarted mirror continues where it stopped. A replica's newest version is written
once a newer one appears.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from dashboard.integrations.sinks.sink import Point
from dashboard.read.run_reader import replicas
from millrace.runtime.metrics import TIME
from storage import layout
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.log import LogCursor
from storage.streams.stream import StreamReader, UnreadablePart

_WAITING = f"{TIME}waiting for "
_TOKENS = "total/tokens"


@dataclass(kw_only=True)
class FlowState:
    """Progress and sums of one replica."""

    cursor: dict[str, Any] = field(default_factory=dict)
    """Position in the replica's metrics, a `LogCursor` as JSON; empty at the start."""
    version: int = -1
    """Policy version being summed; -1: none yet."""
    incarnation: int = 0
    """Trainer incarnation."""
    t: float = 0.0
    """Time of the newest row of that version, unix seconds."""
    waited: float = 0.0
    """Seconds spent waiting."""
    whole: float = 0.0
    """Seconds measured."""
    tokens: float = 0.0
    """Response tokens processed."""
    total: float = 0.0
    """Newest `total/tokens`."""

    def begin(self, version: int, incarnation: int) -> None:
        """Starts to sum another version."""
        self.version, self.incarnation = version, incarnation
        self.waited = self.whole = self.tokens = 0.0


class Flow:
    """Reads the points of all stage replicas of a run."""

    def __init__(self, store: Store, config: Any, states: dict[str, dict[str, Any]]) -> None:
        self._states: dict[str, FlowState] = {}
        self._readers: dict[str, StreamReader] = {}
        for stage, replica in replicas(config):
            name = f"{stage}-{replica}"
            state = self._states[name] = FlowState(**states.get(name, {}))
            cursor = LogCursor.from_json(state.cursor) if state.cursor else None
            self._readers[name] = StreamReader(store, layout.metrics(stage, replica), METRIC, cursor)

    def read_new(self) -> Sequence[Point]:
        """Returns new points by ascending version; of a version made twice since the last call, only the later point.

        Skips parts that can't be read. Raises StreamCorrupt for a damaged record.
        """
        points = {
            (point.policy_version, name): point
            for name, reader in self._readers.items()
            for point in _points(name, reader, self._states[name])
        }
        return [points[key] for key in sorted(points)]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Returns the state to pass to the constructor next time."""
        return {
            name: {**state.__dict__, "cursor": self._readers[name].cursor.to_json()}
            for name, state in self._states.items()
        }


def _points(name: str, reader: StreamReader, state: FlowState) -> Iterator[Point]:
    for part in reader.each():
        if isinstance(part, UnreadablePart):
            continue
        key = itemgetter("policy_version", "incarnation", "t")
        for (version, incarnation, t), rows in groupby(part.table.to_pylist(), key):
            values = {row["name"]: row["value"] for row in rows}
            seconds = {what: value for what, value in values.items() if what.startswith(TIME)}
            if not seconds:
                continue
            if (version, incarnation) != (state.version, state.incarnation):
                if state.whole > 0:
                    yield _point(name, state)
                state.begin(version, incarnation)
            total = values.get(_TOKENS, state.total)
            # A restarted process counts from its checkpoint, or from 0.
            state.tokens += max(0.0, total - state.total)
            state.total, state.t = total, t
            state.whole += sum(seconds.values())
            state.waited += sum(value for what, value in seconds.items() if what.startswith(_WAITING))


def _point(name: str, state: FlowState) -> Point:
    values = {f"flow/{name}/idle_share": state.waited / state.whole}
    if state.total:
        values[f"flow/{name}/tokens_per_second"] = state.tokens / state.whole
    return Point(policy_version=state.version, incarnation=state.incarnation, t=state.t, values=values)
