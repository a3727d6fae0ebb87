"""A stage's measurements on their way into its `metrics` stream: collected, and committed about once a second."""

import time

import pyarrow as pa

from storage import layout
from storage.group_commit import GroupCommit
from storage.schema import METRIC
from storage.store import Store
from storage.stream import StreamWriter

_SECONDS, _ROWS, _BYTES = 1.0, 4096, 1 << 20


class MetricsWriter:
    """Writes the stream of one stage replica."""

    def __init__(self, store: Store, stage: str, replica: int) -> None:
        stream = StreamWriter(store, layout.metrics(stage, replica), METRIC, writer=f"{stage}-{replica}")
        self._commits = GroupCommit(stream, max_rows=_ROWS, max_bytes=_BYTES, max_seconds=_SECONDS)

    def log(self, *, incarnation: int, policy_version: int, **values: float) -> None:
        """Measurements of now, each a row; names end in their unit where they have one."""
        now = time.time()
        rows = [
            {
                "t": now,
                "incarnation": incarnation,
                "policy_version": policy_version,
                "name": name,
                "value": float(value),
            }
            for name, value in values.items()
        ]
        self._commits.append(pa.Table.from_pylist(rows, schema=METRIC), tokens=0)

    def close(self) -> None:
        """Commits what is left."""
        self._commits.close()
