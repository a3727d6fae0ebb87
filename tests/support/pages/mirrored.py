"""A run whose trainer has measured something, and `millrace mirror` as a process."""

import json
import os
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
from support.campaigns import campaigns
from support.stored_run.metrics import metric_rows
from tensorboardX.proto.event_pb2 import Event
from wandb.proto.wandb_internal_pb2 import Record

from dashboard.integrations.sinks.copying import Mirror
from dashboard.integrations.sinks.tensorboard import TensorBoard
from millrace.evaluation.results import write_result
from millrace.runs.record import create_run
from storage import layout
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.stream import StreamWriter

DEADLINE = 60.0
"""Seconds that anything here may take."""
CONFIG = {
    "name": "mine",
    "training": {"max_steps": 10},
    "generation": {"replicas": 2},
    "scoring": {"replicas": 1, "reward": "exact_match"},
    "pipeline": {"mode": "async"},
    "staleness": {"max_staleness": 4},
    "weights": {"transport": "shm"},
}


class Trained:
    """A run whose trainer has measured something, a part a step."""

    def __init__(self, store: Store, run_id: str = "mine") -> None:
        self.store = store
        create_run(store, run_id, CONFIG)
        self._streams: dict[str, StreamWriter] = {}

    def step(self, *versions: int, incarnation: int = 0, reward: float | None = None) -> None:
        """Adds a part for each of these policy versions, with `reward` or else an eighth of the version."""
        for version in versions:
            values = {"reward_mean": version / 8 if reward is None else reward, "loss": -1.0}
            self._measure("train", 0, values, 100.0 + version, version, incarnation)

    def work(self, replica: int, t: float, version: int, *, busy: float, waited: float, tokens: float) -> None:
        """Adds a generator's time since its last row, seconds, and its tokens since its start, at a policy version."""
        values = {"time/generate/seconds": busy, "time/waiting for room/seconds": waited, "total/tokens": tokens}
        self._measure("generate", replica, values, t, version, 0)

    def evaluate(self, version: int, accuracy: float, t: float = 50.0) -> None:
        write_result(self.store, {"policy_version": version, "accuracy": accuracy, "prompts": 8, "t": t})

    def _measure(
        self, stage: str, replica: int, values: dict[str, float], t: float, version: int, incarnation: int
    ) -> None:
        path = layout.metrics(stage, replica)
        if path not in self._streams:
            self._streams[path] = StreamWriter(self.store, path, METRIC, f"{stage}-{replica}")
        rows = metric_rows(values, t=t, incarnation=incarnation, policy_version=version)
        self._streams[path].write(rows, tokens=0)


def copy(store: Store, folder: Path) -> int:
    """Starts the mirror to TensorBoard once; returns how many points it wrote."""
    copying = Mirror(store, TensorBoard(str(folder.parent), folder.name))
    try:
        copying.copy()
    finally:
        copying.close()
    return copying.points


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events(folder: Path) -> Iterator[Event]:
    """All events of a folder, in the order in which TensorBoard reads them; each record's checksums are verified."""
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == _masked_crc(data[:8])
            body, data = data[12 : 12 + length], data[12 + length :]
            assert struct.unpack("<I", data[:4])[0] == _masked_crc(body)
            data = data[4:]
            yield Event.FromString(body)


def wandb_records(file: Path) -> Iterator[Record]:
    """W&B's own log: LevelDB's format, in blocks of 32 KiB, behind seven bytes that name it."""
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    position, body = 7, b""
    while position < len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        body += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield Record.FromString(body)
            body = b""


def wandb_rows(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, values) of all runs written offline in the folder, oldest first."""
    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                rows.append((record.history.step.num, {k: v for k, v in values.items() if not k.startswith("_")}))
    return rows


def start_mirror(trained: Trained, *command: object, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """`millrace mirror` of the run, with the options of `command`; of W&B's own variables it has only those given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli.main", "mirror", trained.store.url, *map(str, command)],
        cwd=cwd,
        env=inherited | {"PYTHONPATH": str(campaigns.REPOSITORY)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_mirror(trained: Trained, *command: object, cwd: Path, **environment: str) -> str:
    """Runs the same to its end, which must be a good one. Returns its output."""
    process = start_mirror(trained, *command, cwd=cwd, **environment)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    return out


@contextmanager
def listening(called: threading.Event) -> Iterator[str]:
    """An address on this machine that serves nothing; `called` is set by the first connection."""

    class Caller(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            called.set()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Caller) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


wait_until = partial(campaigns.wait_until, what="the mirror", seconds=DEADLINE)
