"""OpenTelemetry traces of trajectories, sent by OTLP over HTTP: one trace per trajectory that the trainer took.

    ║ consumed ║ ───────────┐         trajectory ──────────────────────────── from its admission to the end of its step
    ║ trajectories/<g> ║ ───┼─► trace   ├─ queued
    ║ scores/… ║ ───────────┘           ├─ sampled, by each policy version
                                        ├─ environment, for each of its answers
                                        └─ scored, trained

Ids are hashes of the run and the row, so spans that are sent again after a crash replace themselves. A step that a
restarted trainer repeats adds spans with a higher `millrace.incarnation` to the same trace.
"""

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.stored import AnnotatorPools
from dashboard.integrations.sinks.sink import read_state
from dashboard.queries.series import TRAINER, metric
from dashboard.queries.timeline import segments_of
from dashboard.read.groups import Row
from dashboard.read.model import RunData
from dashboard.read.parts import PartReader
from dashboard.read.run_reader import RunReader
from millrace.errors import InputError, MissingExtra
from millrace.runs.record import latest_attempt, read_run
from storage import layout
from storage.schema import CONSUMED, SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.log import LogCursor
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader, UnreadablePart

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
except ImportError as error:
    raise MissingExtra("--otlp", "opentelemetry-exporter-otlp-proto-http", "otlp") from error

_PATH = "/v1/traces"
_URL = re.compile(r"https?://[^\s/@]+(/\S*)?")
_SPANS_PER_REQUEST = 2048
"""About a megabyte."""
_LOGGED = 64
"""The exporter's messages that are kept: the reasons of a failure."""
_COLUMNS = (
    "row_id", "source", "prompt_id", "incarnation", "span_versions", "finish_reason", "t_admitted", "t_started",
    "t_finished", "t_environment",
)  # fmt: skip
_SCORE_COLUMNS = ("row_id", "error", "seconds", "t_scored")
_ATTRIBUTES = (
    "incarnation", "policy_version", "generator", "trajectory_row_id", "group_id", "sample_index", "source", "outcome",
    "staleness", "staleness_in_flight", "masked_tokens", "reward", "advantage",
)  # fmt: skip
"""Columns of `consumed` that a trace has, each as `millrace.<column>`."""


class Traces:
    """Sends the traces of a run to the OTLP receiver at `url`, and saves its state to `millrace-otlp/`.

    Raises RunMissing, and InputError for a URL that can't be used or if the state can't be saved.
    """

    def __init__(self, store: Store, url: str) -> None:
        if not _URL.fullmatch(url):
            raise InputError(
                repr(url), key="--otlp", expected="an OTLP receiver's address, such as http://localhost:4318"
            )
        self._run, attempt = read_run(store), latest_attempt(store)
        self._url = url.rstrip("/").removesuffix(_PATH)
        address = self._url.partition("://")[2].replace("/", "_")
        self._state_file = Path("millrace-otlp") / f"{address}-{self._run['run_id']}.json"
        self._state = read_state(self._state_file, self._run)
        self._state.save(self._state_file)
        cursor = LogCursor.from_json(self._state.cursor) if self._state.cursor else None
        self._consumed = StreamReader(store, layout.CONSUMED, CONSUMED, cursor)
        self._next: Part | None = None
        self._pools = AnnotatorPools.of(attempt.config)
        self._parts, self._runs = PartReader(store), RunReader(store)
        self._exporter = OTLPSpanExporter(endpoint=self._url + _PATH)
        self._resource = Resource.create(
            {
                "service.name": "millrace",
                "service.version": attempt.provenance.commit or "unknown",
                "service.instance.id": self._run["run_id"],
                "millrace.run_id": self._run["run_id"],
            }
        )
        self._log = BufferingHandler(_LOGGED)
        exporter_log = logging.getLogger("opentelemetry.exporter")
        exporter_log.propagate = False
        exporter_log.addHandler(self._log)
        self._num_traces = 0

    @property
    def summary(self) -> str:
        """The number of traces sent, and the receiver."""
        return f"{self._num_traces} new traces ─► {self._url}"

    def copy(self) -> None:
        """Sends the trajectories taken since the last call.

        Raises InputError if the receiver does not accept them, and StreamCorrupt for a damaged record.
        """
        run = self._runs.look()
        while (part := self._read_next()) is not None and _is_measured(run, part):
            traces = [self._trace(run, *rows) for rows in self._rows(part.table.to_pylist())]
            self._send([span for trace in traces for span in trace])
            self._num_traces += len(traces)
            self._next = None
            self._state.cursor = self._consumed.cursor.to_json()
            self._state.save(self._state_file)

    def close(self) -> None:
        self._exporter.shutdown()

    def _read_next(self) -> Part | None:
        """Reads the next part of `consumed` that can be read; again the same one until it is sent."""
        while self._next is None and (part := next(self._consumed.each(), None)) is not None:
            if isinstance(part, UnreadablePart):
                print(f"millrace: skipped: {part.error}", file=sys.stderr)
            else:
                self._next = part
        return self._next

    def _rows(self, consumed: list[Row]) -> Iterator[tuple[Row, Row | None, Row]]:
        """Yields the trajectory, score and row of `consumed` of each trajectory that can be read."""
        problems: list[str] = []
        taken: dict[int, dict[int, Row]] = defaultdict(dict)
        for row in consumed:
            taken[row["generator"]][row["trajectory_row_id"]] = row
        for generator, rows in taken.items():
            path = layout.trajectories(generator)
            found = (self._parts.record_of(path, row_id, problems) for row_id in rows)
            for record in {record.part: record for record in found if record is not None}.values():
                if (table := self._parts.try_read(path, TRAJECTORY, record, problems)) is None:
                    continue
                trajectories = _trajectories(table, rows)
                scores = self._scores(generator, record, {row["source"] for row in trajectories}, problems)
                for row in trajectories:
                    yield row, scores.get(row["row_id"]), rows[row["row_id"]]
        for problem in dict.fromkeys(problems):
            print(f"millrace: skipped: {problem}", file=sys.stderr)

    def _scores(self, generator: int, record: Record, sources: set[str], problems: list[str]) -> dict[int, Row]:
        """Reads the scores of a part of trajectories, by row."""
        scores: dict[int, Row] = {}
        for pool in {self._pools.of_source("scores", source) for source in sources}:
            assert pool is not None, "every source has scorers"
            path = layout.annotations_of_part(pool, generator, record.part, self._pools.replicas[pool])
            if (part := self._parts.part_of(path, SCORE, record.first_row_id, problems)) is not None:
                rows = part[1].filter(pc.field("t_scored") > 0).select(_SCORE_COLUMNS).to_pylist()
                scores |= {row["row_id"]: row for row in rows}
        return scores

    def _trace(self, run: RunData, trajectory: Row, score: Row | None, consumed: Row) -> list[ReadableSpan]:
        generator, row_id = consumed["generator"], consumed["trajectory_row_id"]
        key = (self._run["run_id"], self._run["t_started"], generator, row_id)

        def context(number: int) -> SpanContext:
            span_id = _hash(8, *key, consumed["incarnation"], number)
            return SpanContext(_hash(16, *key), span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        def span(number: int, name: str, start: float, end: float, **values: Any) -> ReadableSpan:
            return ReadableSpan(
                name,
                context(number),
                context(0) if number else None,
                self._resource,
                start_time=round(1e9 * start),
                end_time=round(1e9 * end),
                instrumentation_scope=InstrumentationScope("millrace"),
                **values,
            )

        attributes = {
            "gen_ai.usage.input_tokens": trajectory["prompt_length"],
            "gen_ai.usage.output_tokens": consumed["tokens"],
            "gen_ai.response.finish_reasons": [trajectory["finish_reason"]],
            "millrace.prompt_id": trajectory["prompt_id"],
            **{f"millrace.{name}": consumed[name] for name in _ATTRIBUTES if consumed[name] is not None},
        }
        error = None if score is None else score["error"]
        status = Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error)
        root = span(0, "trajectory", trajectory["t_admitted"], consumed["t"], attributes=attributes, status=status)
        spans = [root]
        for number, segment in enumerate(segments_of(run, generator, trajectory, score, consumed, {}), start=1):
            if segment.kind != "waited":
                version = segment.policy_version
                values = {} if version is None else {"millrace.policy_version": version}
                spans.append(span(number, segment.kind, segment.start, segment.end, attributes=values))
        return spans

    def _send(self, spans: list[ReadableSpan]) -> None:
        for start in range(0, len(spans), _SPANS_PER_REQUEST):
            self._log.flush()
            if self._exporter.export(spans[start : start + _SPANS_PER_REQUEST]) is not SpanExportResult.SUCCESS:
                # Later messages are about its attempts to send them again.
                raise InputError(f"OTLP: {self._log.buffer[0].getMessage()}", file=f"--otlp {self._url}")


def _is_measured(run: RunData, part: Part) -> bool:
    """Whether the durations of the part's steps are stored, or never will be because the run is over."""
    if run.status is None or run.status["state"] != "running":
        return True
    steps = metric(run, TRAINER, "train_seconds")
    newest = (steps["incarnation"][-1], steps["policy_version"][-1]) if len(steps["t"]) else (-1, -1)
    return newest >= (part.record.incarnation, part.record.max_policy_version)


def _trajectories(table: pa.Table, row_ids: Mapping[int, Row]) -> list[Row]:
    """Reads the rows that are in `row_ids`, without their tokens."""
    chosen = table.filter(pc.is_in(table["row_id"], pa.array(row_ids, pa.int64())))
    lengths = pc.list_value_length(chosen["prompt_tokens"])
    rows: list[Row] = chosen.select(_COLUMNS).append_column("prompt_length", lengths).to_pylist()
    return rows


def _hash(size: int, *key: object) -> int:
    """Hashes a key to an id of `size` bytes."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=size).digest(), "big")
