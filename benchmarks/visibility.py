"""How soon a part is seen by a reader in another process.

    writer (this process)                              reader (python -m benchmarks.visibility URL PATH)
      write() called
        segment, its fsync
        record: link() or the PUT's reply ── visible ┄┄► looks every store.poll_seconds: next()
        fsync of the folder                                record, segment, checksum, Arrow
      write() returns                                    next() returns the part ──► says when
      next part, after a pause  ◄──────────────────────────────────────────────────────┘

CLOCK_MONOTONIC is one clock for all processes of a machine. On a local store the clock of "visible" starts when Python
is about to make the link that gives the record its name: its audit event says so. An object store tells nobody when an
object became visible, so there the clock starts when write() returns, and a reader may be earlier than that.
"""

import os
import random
import subprocess
import sys
import time
from typing import IO, Any

import numpy as np

from benchmarks.parts import about, open_writer
from benchmarks.rows import renumbered, trajectories
from storage.factory import open_store
from storage.schema import TRAJECTORY
from storage.store import Store
from storage.stream import StreamReader


def measure_visibility(store: Store, path: str, num_rows: int, num_parts: int) -> dict[str, Any]:
    """Milliseconds, p50 and p99 of `num_parts` parts, from a part's publication, and from the call of write(), until
    the reader has it.
    """
    writer = open_writer(store, path)
    table = trajectories(num_rows)
    pauses = random.Random(0)
    links = _Links()
    times = []
    command = [sys.executable, "-m", "benchmarks.visibility", store.url, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        try:
            _line(reader.stdout)
            for _ in range(num_parts):
                part = renumbered(table, writer.rows)
                said = about(part)
                # Anywhere between two looks of the reader.
                time.sleep(2 * store.poll_seconds * (1 + pauses.random()))
                links.last = None
                called = time.monotonic()
                record = writer.write(part, **said)
                published = links.last or time.monotonic()
                times.append((called, published, _line(reader.stdout)))
                store.delete(f"{path}/{record.seg}")
        finally:
            reader.kill()
    called_at, published_at, seen_at = 1000 * np.array(times).T
    return {
        "parts": num_parts,
        "rows": num_rows,
        "poll_ms": 1000 * store.poll_seconds,
        "published": "link" if links.last is not None else "reply",
        "since_published_ms": _percentiles(seen_at - published_at),
        "since_called_ms": _percentiles(seen_at - called_at),
    }


class _Links:
    """Hears when this process makes a link. An audit hook stays for the life of its process, and does little."""

    def __init__(self) -> None:
        self.last: float | None = None
        """When the last one was about to be made, by time.monotonic(); None before the first."""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: object) -> None:
        if event == "os.link":
            self.last = time.monotonic()


def _line(reader: IO[str]) -> float:
    line = reader.readline()
    if not line:
        raise RuntimeError("the reading process ended early; what it printed says why")
    return float(line)


def _percentiles(milliseconds: Any) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(milliseconds, percent)) for percent in (50, 99)}


def _watch(url: str, path: str) -> None:
    """The reader: prints the time when it is ready, then that of each part, until its parent ends it or is gone."""
    parent = os.getppid()
    store = open_store(url)
    reader = StreamReader(store, path, TRAJECTORY)
    print(time.monotonic(), flush=True)
    while os.getppid() == parent:
        if reader.next() is None:
            time.sleep(store.poll_seconds)
        else:
            print(time.monotonic(), flush=True)


if __name__ == "__main__":
    _watch(*sys.argv[1:])
