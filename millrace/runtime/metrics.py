"""A stage's metrics: its pace, and the stream they are committed to."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread

import pyarrow as pa

from storage import layout
from storage.errors import StorageError
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.group_commit import GroupCommit
from storage.streams.merged import EVERY, merge_parts
from storage.streams.stream import StreamWriter

RewardCurve = list[list[float]]
"""Policy version and mean reward of steps, by ascending version."""
MOST_POINTS = 64
"""Of a RewardCurve in a status record."""
RECENT_STEPS = 10
"""Steps of the means by which displays say how a run is doing now."""
RECENT = ("reward_mean", "loss", "staleness_mean", "staleness_max", "effective_sample_size")
"""Measures whose values at these steps are in the status record."""
TIME = "time/"
"""Prefix of time metrics: `time/<activity>/seconds` is the time spent on it since the last row."""
_SECONDS, _ROWS, _BYTES = 1.0, 4096, 1 << 20


class MetricsWriter:
    """Writes the metrics stream of one stage replica, with a commit about once a second, and merges its older parts."""

    def __init__(self, store: Store, stage: str, replica: int) -> None:
        self._store = store
        self._stage = stage
        self._replica = replica
        self._stream = StreamWriter(store, layout.metrics(stage, replica), METRIC, writer=f"{stage}-{replica}")
        self._commits = GroupCommit(self._stream, max_rows=_ROWS, max_bytes=_BYTES, max_seconds=_SECONDS)
        self._merges = self._stream.parts // EVERY
        self._merging = Thread()

    def log(self, *, incarnation: int, policy_version: int, **values: float) -> None:
        """Adds one row per value, with the current time. Names end in their unit if they have one."""
        common = {"t": time.time(), "incarnation": incarnation, "policy_version": policy_version}
        rows = [{**common, "name": name, "value": float(value)} for name, value in values.items()]
        self._commits.append(
            pa.Table.from_pylist(rows, schema=METRIC),
            tokens=0,
            min_policy_version=policy_version,
            max_policy_version=policy_version,
            incarnation=incarnation,
        )
        # By the number of all parts: processes that die young merge too.
        if (merges := self._stream.parts // EVERY) > self._merges and not self._merging.is_alive():
            self._merges = merges
            self._merging = Thread(target=self._merge, name="merge", daemon=True)
            self._merging.start()

    def close(self) -> None:
        """Commits the rows still in memory."""
        self._commits.close()
        if self._merging.is_alive():
            self._merging.join()

    def _merge(self) -> None:
        # Readers take rows that are not merged from the stream itself, and the next merge begins with them.
        with suppress(StorageError, OSError):
            paths = layout.metrics(self._stage, self._replica), layout.merged_metrics(self._stage, self._replica)
            merge_parts(self._store, *paths, METRIC, f"{self._stage}-{self._replica}")


class Pace:
    """Mean pace of one trainer process, from the end of its first step: the one before waited for the pipeline to fill.

    `clock` is a monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None
        self._steps = 0
        self._tokens = 0.0

    def step(self, tokens: float) -> dict[str, float]:
        """Counts a step that ends now and trained this many response tokens.

        Returns `step_seconds` and `tokens_per_second` so far; nothing after the first step.
        """
        now = self._clock()
        if self._first is None:
            self._first = now
            return {}
        self._steps += 1
        self._tokens += tokens
        seconds = now - self._first
        return {"step_seconds": seconds / self._steps, "tokens_per_second": self._tokens / seconds} if seconds else {}


def extend_curve(curve: RewardCurve, policy_version: int, reward: float) -> RewardCurve:
    """Adds a step's mean reward to a curve of at most 64 points, for status records.

    Keeps the versions that are multiples of the smallest sufficient power of 2, and the newest. Versions that the step
    repeats or precedes were rolled back, and are dropped.
    """
    stride = 1 << (policy_version // MOST_POINTS).bit_length()
    kept = [point for point in curve if point[0] < policy_version and point[0] % stride == 0]
    return [*kept, [policy_version, reward]]


def extend_recent(recent: Mapping[str, list[float]], measures: Mapping[str, float]) -> dict[str, list[float]]:
    """Adds a step to the values of the last ten steps by measure. Values that are not finite are left out."""
    finite = {name: measures[name] for name in RECENT if math.isfinite(measures.get(name, math.nan))}
    return {**recent, **{name: [*recent.get(name, ()), value][-RECENT_STEPS:] for name, value in finite.items()}}
