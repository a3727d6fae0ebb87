"""A run's reward curve from a few parts of its metrics, so that a table of many runs is drawn quickly.

log of metrics/train-0   0 1 2 3 4 5 6 7 8 …      every record, later every 2nd, every 4th, …: at most 32 parts
                         ▲   ▲   ▲   ▲   ▲        records are read by number, skipping those between
"""

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from dashboard.read.model import Columns
from storage import layout
from storage.errors import StorageError
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.log import LogReader
from storage.streams.record import decode
from storage.streams.stream import read_part

_PATH = layout.metrics("train", 0)
_REWARD = "reward_mean"
_MOST_PARTS = 32


class RewardCurve:
    """Samples a run's mean reward incrementally. Not thread-safe, but `points` is."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._log: LogReader | None = None
        self._stride = 1
        self._points: dict[int, tuple[float, float] | None] = {}
        """Record number → mean policy version and reward of the part; None if it has no step."""
        self.points = _columns([])
        """policy_version, ascending, and reward; without rolled-back steps."""

    def read_new(self, enough: Callable[[], bool]) -> bool:
        """Reads at least one new part, then until `enough`. Returns whether all were read. Raises StreamCorrupt."""
        # A snapshot avoids reading the whole log to find its end.
        self._log = self._log or LogReader.at_snapshot(self._store, _PATH)
        end = self._log.to_head().seq
        while -(-end // self._stride) > _MOST_PARTS:
            self._stride *= 2
        self._points = {seq: point for seq, point in self._points.items() if seq % self._stride == 0}
        new = [seq for seq in range(0, end, self._stride) if seq not in self._points]
        num_read = 0
        while num_read < len(new) and not (num_read and enough()):
            self._points[new[num_read]] = self._point(new[num_read])
            num_read += 1
        if num_read:
            self.points = _columns([point for _, point in sorted(self._points.items()) if point is not None])
        return num_read == len(new)

    def _point(self, seq: int) -> tuple[float, float] | None:
        file = f"{_PATH}/{layout.record(seq)}"
        try:
            record = decode(bytes(self._store.get(file)), file)
            if record.kind != "data":
                return None
            rows = read_part(self._store, _PATH, METRIC, record, ["name", "policy_version", "value"])
        except StorageError:
            # The run's page shows the error; here a point is missing.
            return None
        return _mean(rows)


def _columns(points: Sequence[tuple[float, float]]) -> Columns:
    """Converts points in stream order to columns, without rolled-back points."""
    kept: list[tuple[float, float]] = []
    for point in points:
        # A restarted trainer repeats the versions after its checkpoint.
        while kept and kept[-1][0] >= point[0]:
            kept.pop()
        kept.append(point)
    versions, rewards = np.array(kept, np.float64).reshape(-1, 2).T
    return {"policy_version": versions, "reward": rewards}


def _mean(rows: pa.Table) -> tuple[float, float] | None:
    names = rows["name"].to_pylist()
    steps = [i for i, name in enumerate(names) if name == _REWARD]
    values = rows["value"].to_numpy()[steps]
    if not steps or not np.isfinite(values).all():
        return None
    return float(rows["policy_version"].to_numpy()[steps].mean()), float(values.mean())
