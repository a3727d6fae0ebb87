"""Event files for TensorBoard, by tensorboardX: `FOLDER/RUN_ID/events.out.tfevents.…`, a file a start of the mirror.

    first start     v1 ─ v2 ─ v3 ✗ killed; remembered up to v2
    second start    purge from v3 on ─ v3 ─ v4 ─ …             TensorBoard hides what the first one wrote beyond v2
    rolled back     purge from v2 on ─ v2' ─ v3' ─ …           and the versions that a restarted trainer made again

A purge is what `purge_step` of TensorBoard's own writer says: the points stay in their file and are not shown.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboard.sinks.sink import Memory, Point
from millrace.errors import InputError

try:
    # Not the SummaryWriter above it: its flush does not wait for what a thread of its own has yet to write.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
except ImportError as error:
    raise InputError("--tensorboard needs the package tensorboardX: pip install tensorboardX") from error


class TensorBoard:
    """Writes event files into `folder`, and remembers how far in `folder/millrace.json`."""

    def __init__(self, folder: Path) -> None:
        self.name = f"TensorBoard, {folder}"
        self.memory = folder / "millrace.json"
        self._folder = folder
        self._events: EventsWriter

    def open(self, run: Mapping[str, Any], config: Mapping[str, Any], memory: Memory) -> None:
        """Begin a file behind what `memory` knows of. Raises InputError where the folder can't be written."""
        if memory.opened == 0:
            self._begin(memory)
        else:
            self._begin(memory, purge_from=memory.newest + 1)
            memory.forget_evaluations(memory.newest + 1)

    def write(self, points: Sequence[Point], memory: Memory) -> None:
        """An event a point."""
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._events.write_event(Event(wall_time=point.t, step=point.policy_version, summary=Summary(value=values)))
        memory.rows += len(points)

    def roll_back(self, policy_version: int, memory: Memory) -> None:
        """Begin another file, that hides the points of `policy_version` and later."""
        self._events.close()
        self._begin(memory, purge_from=policy_version)

    def flush(self) -> None:
        """The file is on the disk."""
        self._events.flush()

    def close(self) -> None:
        """The file is complete."""
        self._events.close()

    def _begin(self, memory: Memory, purge_from: int | None = None) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names, which begin with the second they were made in.
            self._events = EventsWriter(str(self._folder / "events"), f".{memory.opened:06d}")
            memory.opened += 1
            # Before anything is in the file: its name is not given twice.
            memory.save(self.memory)
        except OSError as error:
            raise InputError(f"--tensorboard: can't write to {self._folder}: {error.strerror or error}") from error
        if purge_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=purge_from, session_log=start))
