"""What earlier versions stored is read by this one: the same rows, the same sums, and it can be written on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage import layout
from storage.checkpoints import load_file, read_latest
from storage.schema import METRIC, SCHEMA_VERSION, SCORE, TRAJECTORY, since
from storage.stores.local import LocalStore
from storage.streams.log import LogReader, backwards
from storage.streams.record import Record
from storage.streams.stream import StreamReader, StreamWriter, stream_head

STORED = Path(__file__).parent / "stored"
SCHEMAS = {
    layout.trajectories(0): TRAJECTORY,
    layout.scores("exact_match", 0, 0, 1): SCORE,
    layout.metrics("train", 0): METRIC,
}


def expected(version: int) -> dict[str, Any]:
    holds: dict[str, Any] = json.loads((STORED / f"schema-{version}.json").read_text())
    return holds


def default_of(field: pa.Field) -> object:
    return json.loads(field.metadata[b"default"])


@pytest.fixture(params=range(1, SCHEMA_VERSION + 1))
def version(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def test_every_schema_version_has_its_stored_streams() -> None:
    assert {path.name for path in STORED.glob("schema-*/")} >= {f"schema-{n}" for n in range(1, SCHEMA_VERSION + 1)}


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_row_and_every_sum_comes_back(version: int, path: str) -> None:
    store, holds = LocalStore(STORED / f"schema-{version}"), expected(version)["streams"][path]
    reader = StreamReader(store, path, SCHEMAS[path])
    rows = [row for part in iter(reader.next, None) for row in part.table.to_pylist()]
    added = {field.name: default_of(field) for field in SCHEMAS[path] if since(field) > version}
    assert rows == [row | added for row in holds["rows"]]
    assert rows
    assert reader.cursor.to_json() == stream_head(store, path).to_json() == holds["head"]


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_record_is_read_forwards_and_backwards(version: int, path: str) -> None:
    store = LocalStore(STORED / f"schema-{version}")
    reader = LogReader(store, path)
    records: list[Record] = list(iter(reader.next, None))
    assert list(backwards(store, path, reader.cursor)) == records[::-1]
    assert {record.schema_version for record in records if record.kind == "data"} == {version}


def test_the_latest_checkpoint_comes_back(version: int) -> None:
    store, holds = LocalStore(STORED / f"schema-{version}"), expected(version)["checkpoint"]
    checkpoint = read_latest(store)
    if holds is None:
        assert checkpoint is None
        return
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.state) == (holds["step"], holds["state"])
    assert {name: load_file(store, ref).decode() for name, ref in checkpoint.files.items()} == holds["files"]


def test_a_new_writer_goes_on_where_an_old_one_was(version: int, tmp_path: Path) -> None:
    shutil.copytree(STORED / f"schema-{version}", tmp_path / "run")
    store, path = LocalStore(tmp_path / "run"), layout.trajectories(0)
    holds = expected(version)["streams"][path]
    rows = holds["rows"]
    writer = StreamWriter(store, path, TRAJECTORY, "generate-0", group_size=4)
    assert (writer.epoch, writer.rows) == (holds["head"]["epoch"] + 1, len(rows))
    first = StreamReader(store, path, TRAJECTORY).next()
    assert first is not None
    ids = pa.array(range(len(rows), len(rows) + 4), pa.int64())
    writer.write(first.table.set_column(0, TRAJECTORY.field("row_id"), ids), tokens=0)
    reader = StreamReader(store, path, TRAJECTORY, columns=["row_id"])
    read = [row_id for part in iter(reader.next, None) for row_id in part.table["row_id"].to_pylist()]
    assert read == list(range(len(rows) + 4))
