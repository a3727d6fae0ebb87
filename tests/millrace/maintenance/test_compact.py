"""Parquet files hold exactly the values of the streams, each trajectory with its score, for any reader of Parquet."""

from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.stores.dict_store import DictStore
from support.streams.rows import teacher_rows

from millrace.maintenance.compact import MEASURED, SCORED, compact
from millrace.maintenance.gc import Retention, carry_out, plan
from millrace.runs.record import latest_attempt, resume_run
from storage import layout
from storage.schema import CONSUMED, METRIC, SCORE, TEACHER, TRAJECTORY
from storage.stores.base import Store
from storage.stores.local import LocalStore
from storage.streams.stream import StreamReader, StreamWriter

Rows = list[dict[str, Any]]
NOT_TAUGHT = dict.fromkeys(name for name in TEACHER.names if name.startswith("teacher_"))


def rows_of(store: Store, path: str, schema: pa.Schema) -> Rows:
    reader = StreamReader(store, path, schema)
    return [row for part in iter(reader.next, None) for row in part.table.to_pylist()]


def expected_rows(store: Store) -> Rows:
    """Trajectories with their scores, joined the slow way: by row id, in Python."""
    rows = []
    for generator in range(2):
        scores = {
            row.pop("row_id"): row
            for scorer in range(2)
            for row in rows_of(store, layout.annotations("scores/exact_match", generator, scorer, 2), SCORE)
        }
        unscored = {name: None for name in SCORE.names if name != "row_id"}
        for row in rows_of(store, layout.trajectories(generator), TRAJECTORY):
            rows.append(row | scores.get(row["row_id"], unscored) | NOT_TAUGHT)
    return rows


def parquet_rows(store: DictStore, path: str) -> Rows:
    return pq.read_table(pa.py_buffer(store.objects[path])).to_pylist()  # type: ignore[no-any-return]


@pytest.fixture
def analysis(small_run: Any, dict_store: DictStore, tmp_path: Path) -> Path:
    """A folder that a run was compacted into, in files of a few parts each."""
    compact(dict_store, LocalStore(tmp_path), file_bytes=2000)
    return tmp_path


def test_every_reader_finds_every_value(analysis: Path, dict_store: DictStore) -> None:
    files = sorted(analysis.glob("trajectories-*.parquet"))
    assert len(files) > 2
    table = pa.concat_tables([pq.read_table(file) for file in files])
    expected = expected_rows(dict_store)
    assert (table.to_pylist(), table.schema) == (expected, SCORED)
    assert polars.read_parquet(f"{analysis}/trajectories-*.parquet").to_dicts() == expected
    result = duckdb.sql(f"from '{analysis}/trajectories-*.parquet' order by generator, row_id")
    assert [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()] == expected
    measured = pq.read_table(analysis / "metrics-00000.parquet")
    metrics = rows_of(dict_store, layout.metrics("train", 0), METRIC)
    assert measured.to_pylist() == [row | {"stage": "train", "replica": 0} for row in metrics]
    assert measured.schema.equals(MEASURED)


def test_consumed_rows_join_with_their_trajectories(analysis: Path, dict_store: DictStore) -> None:
    table = pa.concat_tables([pq.read_table(file) for file in sorted(analysis.glob("consumed-*.parquet"))])
    assert table.to_pylist() == rows_of(dict_store, layout.CONSUMED, CONSUMED)
    assert table.schema.equals(CONSUMED)
    joined = duckdb.sql(
        f"select count(*), count_if(c.outcome = 'error'), count_if(c.reward is distinct from t.reward) "
        f"from '{analysis}/consumed-*.parquet' c join '{analysis}/trajectories-*.parquet' t "
        "on c.generator = t.generator and c.trajectory_row_id = t.row_id"
    ).fetchall()
    failed = sum(row["outcome"] == "error" for row in table.to_pylist())
    assert joined == [(table.num_rows, failed, 0)]
    assert failed > 0


def test_files_in_the_run_are_replaced(small_run: Any, dict_store: DictStore) -> None:
    stored = set(dict_store.objects)
    first = compact(dict_store, file_bytes=1000)
    assert first.rows == sum(rows for path, rows in first.files.items() if "trajectories" in path) == 74
    assert (first.missing_rows, first.problems) == (0, [])
    assert len(first.files) > 5
    assert set(dict_store.objects) - stored == set(first.files)
    assert all(path.startswith("parquet/") for path in first.files)
    dict_store.put("parquet/notes.txt", b"mine")
    second = compact(dict_store)
    assert set(dict_store.objects) - stored == {
        "parquet/trajectories-00000.parquet",
        "parquet/consumed-00000.parquet",
        "parquet/metrics-00000.parquet",
        "parquet/notes.txt",
    }
    for path, rows in second.files.items():
        assert pq.read_table(pa.py_buffer(dict_store.objects[path])).num_rows == rows


def test_damaged_parts_are_reported_and_left_out(small_run: Any, dict_store: DictStore) -> None:
    carry_out(dict_store, plan(dict_store, Retention(keep_versions=3)))
    assert compact(dict_store).problems == []
    readable = parquet_rows(dict_store, "parquet/trajectories-00000.parquet")
    segments = [path for path in dict_store.objects if path.startswith("streams/trajectories/0/seg/")]
    scores = [path for path in dict_store.objects if path.startswith("streams/scores/exact_match/1/0-of-2/seg/")]
    for path in (segments[1], scores[1]):
        dict_store.objects[path] = b"?"
    done = compact(dict_store)
    assert sorted(problem.partition(" ")[0] for problem in done.problems) == sorted([scores[1], segments[1]])
    rows = parquet_rows(dict_store, "parquet/trajectories-00000.parquet")
    assert done.missing_rows == 74 - len(rows)
    assert 0 < len(rows) < len(readable)
    unscored = [row | {name: None for name in SCORE.names if name != "row_id"} for row in readable]
    changed = [row for row in rows if row not in readable]
    assert changed, "the rows whose scores are damaged"
    assert all(row in unscored for row in changed)


def test_a_stream_ends_before_a_damaged_record(small_run: Any, dict_store: DictStore) -> None:
    path = f"{layout.trajectories(0)}/{layout.record(4)}"
    dict_store.objects[path] = b"?"
    (problem,) = compact(dict_store).problems
    assert problem.startswith(path)
    assert problem.endswith("the rest of this stream was left out")
    generators = [row["generator"] for row in parquet_rows(dict_store, "parquet/trajectories-00000.parquet")]
    assert (generators.count(0), generators.count(1)) == (8, 36)


def test_scores_of_other_rows_are_reported_and_left_out(start_run: Any, dict_store: DictStore) -> None:
    run = start_run(dict_store)
    assert compact(dict_store).files == {}, "a run without rows makes no files"
    run.generate(0)
    run.generate(0)
    run.score(0, 0)
    scored = StreamReader(dict_store, layout.annotations("scores/exact_match", 0, 0, 2), SCORE).next()
    assert scored is not None
    StreamWriter(dict_store, layout.annotations("scores/exact_match", 0, 1, 2), SCORE, "w").write(
        scored.table, tokens=0
    )
    assert compact(dict_store).problems == [
        "trajectories/0: the scores of part 1 belong to other rows and were left out"
    ]
    rows = parquet_rows(dict_store, "parquet/trajectories-00000.parquet")
    assert [row["status"] for row in rows] == ["ok", "ok", None, None]


def test_a_trajectory_has_its_teachers_log_probabilities_or_null(start_run: Any, dict_store: DictStore) -> None:
    run = start_run(dict_store)
    config = latest_attempt(dict_store).config
    config["teachers"] = {"expert": {"path": "start", "replicas": 1}}
    config["training"] = {"distillation": {"teacher": "expert"}}
    resume_run(dict_store, config)
    run.generate(0)
    run.generate(0)
    taught = teacher_rows(0, [[-0.5, -1.0], None])
    StreamWriter(dict_store, layout.annotations("teachers/expert", 0, 0, 1), TEACHER, "teach-0").write(taught, tokens=0)
    assert compact(dict_store).problems == []
    rows = parquet_rows(dict_store, "parquet/trajectories-00000.parquet")
    assert [row["teacher_logprobs"] for row in rows] == [[-0.5, -1.0], [], None, None]
