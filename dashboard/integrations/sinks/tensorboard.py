"""Event files for TensorBoard, by tensorboardX: `FOLDER/RUN_ID/events.out.tfevents.…`, one per start of the mirror.

    first start     v1 ─ v2 ─ v3 ✗ killed; state saved up to v2
    second start    purge from v3 on ─ v3 ─ v4 ─ …             TensorBoard hides points of the first start after v2,
    rolled back     purge from v2 on ─ v2' ─ v3' ─ …           and versions that a restarted trainer repeated

A purge works like `purge_step` of TensorBoard's writer: points stay in their file but are not shown.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboard.integrations.sinks.sink import MirrorState, Point, Sink, Text
from millrace.errors import MissingExtra, writing

try:
    # Not SummaryWriter: its flush does not wait for its writer thread.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboardX.proto.tensor_pb2 import TensorProto
except ImportError as error:
    raise MissingExtra("--tensorboard", "tensorboardX", "tensorboard") from error


class TensorBoard(Sink):
    """Writes event files to `folder/run_id`, and the mirror's state to `millrace.json` there."""

    takes_texts = True

    def __init__(self, folder: str, run_id: str) -> None:
        self._folder = Path(folder) / run_id
        self.name = f"TensorBoard, {self._folder}"
        self.state_file = self._folder / "millrace.json"
        self._events: EventsWriter

    def open(self, run: Mapping[str, Any], config: Mapping[str, Any], state: MirrorState) -> None:
        """Begins a file that continues from `state`. Raises InputError if the folder can't be written."""
        if state.opened == 0:
            self._begin(state)
        else:
            self._begin(state, purge_from=state.newest + 1)
            state.discard_evaluations(state.newest + 1)

    def write(self, points: Sequence[Point], state: MirrorState) -> None:
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._events.write_event(Event(wall_time=point.t, step=point.policy_version, summary=Summary(value=values)))
        state.rows += len(points)

    def write_texts(self, texts: Sequence[Text]) -> None:
        """Writes to TensorBoard's text plugin, which renders Markdown."""
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        for text in texts:
            tensor = TensorProto(dtype="DT_STRING", string_val=[text.markdown.encode()])
            value = Summary.Value(tag=text.name, metadata=metadata, tensor=tensor)
            event = Event(wall_time=text.t, step=text.policy_version, summary=Summary(value=[value]))
            self._events.write_event(event)

    def roll_back(self, policy_version: int, state: MirrorState) -> None:
        """Begins another file, which hides points of `policy_version` and later."""
        self._events.close()
        self._begin(state, purge_from=policy_version)

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()

    def _begin(self, state: MirrorState, purge_from: int | None = None) -> None:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names, which begin with their creation time in seconds.
            self._events = EventsWriter(str(self._folder / "events"), f".{state.opened:06d}")
        state.opened += 1
        # Saved before the first event, so that the file name is not used twice.
        state.save(self.state_file)
        if purge_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=purge_from, session_log=start))
