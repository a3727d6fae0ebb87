"""What each stage replica did at each policy version: the share of its time that it waited, and its tokens per second.

    ║ metrics/<stage>-<r> ║ ─► time/…, total/tokens ─► summed while the version is the same ─► a point once it changes

What is summed so far is part of the state, so a mirror that is started again goes on where it was. The newest version
of each replica follows once there is a newer one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from dashboard.integrations.sinks.sink import Point
from dashboard.read.run_info import replicas
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
    """One replica, as far as it was read."""

    cursor: dict[str, Any] = field(default_factory=dict)
    """Position in its metrics, a `LogCursor` as JSON; empty at the start."""
    version: int = -1
    """The policy version whose time is being summed; -1: none yet."""
    incarnation: int = 0
    """Of the trainer."""
    t: float = 0.0
    """The newest row of that version, unix seconds."""
    waited: float = 0.0
    """Seconds."""
    whole: float = 0.0
    """Seconds measured."""
    tokens: float = 0.0
    """Response tokens processed."""
    total: float = 0.0
    """The newest `total/tokens`."""

    def begin(self, version: int, incarnation: int) -> None:
        """Sum another version."""
        self.version, self.incarnation = version, incarnation
        self.waited = self.whole = self.tokens = 0.0


class Flow:
    """The points of all stage replicas of one run."""

    def __init__(self, store: Store, config: Any, states: dict[str, dict[str, Any]]) -> None:
        names = [f"{stage}-{replica}" for stage, replica in replicas(config)]
        self._states = {name: FlowState(**states.get(name, {})) for name in names}
        self._readers = {
            f"{stage}-{replica}": StreamReader(
                store, layout.metrics(stage, replica), METRIC, _cursor(self._states[f"{stage}-{replica}"])
            )
            for stage, replica in replicas(config)
        }

    def read_new(self) -> Sequence[Point]:
        """By ascending version. Of versions that were made twice since the last call only the later ones.

        A part that can't be read is left out. Raises StreamCorrupt for a damaged record.
        """
        points = {
            (point.policy_version, name): point
            for name, reader in self._readers.items()
            for point in _points(name, reader, self._states[name])
        }
        return [points[key] for key in sorted(points)]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """What `states` of the constructor was."""
        return {
            name: {**state.__dict__, "cursor": self._readers[name].cursor.to_json()}
            for name, state in self._states.items()
        }


def _cursor(state: FlowState) -> LogCursor | None:
    return LogCursor.from_json(state.cursor) if state.cursor else None


def _points(name: str, reader: StreamReader, state: FlowState) -> Iterator[Point]:
    for part in reader.each():
        if isinstance(part, UnreadablePart):
            continue
        for (version, incarnation, t), rows in groupby(part.table.to_pylist(), _measured):
            values = {row["name"]: row["value"] for row in rows}
            seconds = {what: value for what, value in values.items() if what.startswith(TIME)}
            if not seconds:
                continue
            if (version, incarnation) != (state.version, state.incarnation):
                if state.whole > 0:
                    yield _point(name, state)
                state.begin(version, incarnation)
            total = values.get(_TOKENS, state.total)
            # A process that was started again counts from its checkpoint, or from 0.
            state.tokens += max(0.0, total - state.total)
            state.total, state.t = total, t
            state.whole += sum(seconds.values())
            state.waited += sum(value for what, value in seconds.items() if what.startswith(_WAITING))


def _measured(row: dict[str, Any]) -> tuple[int, int, float]:
    return row["policy_version"], row["incarnation"], row["t"]


def _point(name: str, state: FlowState) -> Point:
    values = {f"flow/{name}/idle_share": state.waited / state.whole}
    if state.total:
        values[f"flow/{name}/tokens_per_second"] = state.tokens / state.whole
    return Point(policy_version=state.version, incarnation=state.incarnation, t=state.t, values=values)
