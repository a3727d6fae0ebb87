"""Parquet files hold exactly the values of the streams, each trajectory beside its score, for any reader of Parquet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.stores.dict_store import DictStore

from millrace.errors import RunMissing
from millrace.maintenance.compact import MEASURED, SCORED, compact
from millrace.maintenance.gc import Retention, carry_out, plan
from storage import layout
from storage.schema import CONSUMED, METRIC, SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.stores.local import LocalStore
from storage.streams.stream import StreamReader, StreamWriter

Rows = list[dict[str, Any]]


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
            for row in rows_of(store, layout.scores("exact_match", generator, scorer, 2), SCORE)
        }
        unscored = {name: None for name in SCORE.names if name != "row_id"}
        for row in rows_of(store, layout.trajectories(generator), TRAJECTORY):
            rows.append(row | scores.get(row["row_id"], unscored))
    return rows


def read_with_duckdb(pattern: str) -> Rows:
    result = duckdb.sql(f"from '{pattern}' order by generator, row_id")
    return [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]


@pytest.mark.parametrize("read", [read_with_duckdb, lambda pattern: polars.read_parquet(pattern).to_dicts()])
def test_other_readers_of_parquet_read_the_same(
    analysis: Path, dict_store: DictStore, read: Callable[[str], Rows]
) -> None:
    assert read(f"{analysis}/trajectories-*.parquet") == expected_rows(dict_store)


@pytest.fixture
def analysis(small_run: Any, dict_store: DictStore, tmp_path: Path) -> Path:
    """A folder that a run was compacted into, in files of a few parts each."""
    compact(dict_store, LocalStore(tmp_path), file_bytes=2000)
    return tmp_path


def test_every_value_of_every_trajectory_and_score_is_there(analysis: Path, dict_store: DictStore) -> None:
    files = sorted(analysis.glob("trajectories-*.parquet"))
    assert len(files) > 2
    table = pa.concat_tables([pq.read_table(file) for file in files])
    assert table.to_pylist() == expected_rows(dict_store)
    assert table.schema.equals(SCORED)
    measured = pq.read_table(analysis / "metrics-00000.parquet")
    expected = rows_of(dict_store, layout.metrics("train", 0), METRIC)
    assert measured.to_pylist() == [row | {"stage": "train", "replica": 0} for row in expected]
    assert measured.schema.equals(MEASURED)


def test_what_became_of_each_trajectory_is_there_and_joins_with_it(analysis: Path, dict_store: DictStore) -> None:
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


def test_it_goes_into_the_run_unless_told_otherwise_and_replaces_what_was_there(
    small_run: Any, dict_store: DictStore
) -> None:
    before = set(dict_store.objects)
    first = compact(dict_store, file_bytes=1000)
    assert first.rows == sum(file.rows for file in first.files if "trajectories" in file.path) == 74
    assert (first.unscored_rows, first.missing_rows, first.problems) == (2, 0, [])
    assert len(first.files) > 5
    assert set(dict_store.objects) - before == {file.path for file in first.files}
    assert all(file.path.startswith("parquet/") for file in first.files)
    dict_store.put("parquet/notes.txt", b"mine")
    second = compact(dict_store)
    assert set(dict_store.objects) - before == {
        "parquet/trajectories-00000.parquet",
        "parquet/consumed-00000.parquet",
        "parquet/metrics-00000.parquet",
        "parquet/notes.txt",
    }
    for file in second.files:
        table = pq.read_table(pa.py_buffer(dict_store.objects[file.path]))
        assert (table.num_rows, len(dict_store.objects[file.path])) == (file.rows, file.bytes)


def test_damaged_and_removed_parts_are_left_out_and_the_damaged_told(small_run: Any, dict_store: DictStore) -> None:
    carry_out(dict_store, plan(dict_store, Retention(keep_versions=3)))
    everything = expected_rows_that_can_be_read(dict_store)
    segments = [path for path in dict_store.objects if path.startswith("streams/trajectories/0/seg/")]
    scores = [path for path in dict_store.objects if path.startswith("streams/scores/exact_match/1/0-of-2/seg/")]
    for path in (segments[1], scores[1]):
        dict_store.objects[path] = b"?"
    done = compact(dict_store)
    assert sorted(problem.partition(" ")[0] for problem in done.problems) == sorted([scores[1], segments[1]])
    table = pq.read_table(pa.py_buffer(dict_store.objects["parquet/trajectories-00000.parquet"]))
    found = table.to_pylist()
    assert done.missing_rows == 74 - len(found)
    assert 0 < len(found) < len(everything)
    by_place = {(row["generator"], row["row_id"]): row for row in everything}
    bare = [row for row in found if row != by_place[row["generator"], row["row_id"]]]
    assert bare, "the rows whose scores are damaged"
    for row in bare:
        expected = by_place[row["generator"], row["row_id"]]
        assert row == expected | {name: None for name in SCORE.names if name != "row_id"}
    assert done.unscored_rows == len(bare) + 2


def expected_rows_that_can_be_read(store: DictStore) -> Rows:
    done = compact(store)
    assert done.problems == []
    return pq.read_table(pa.py_buffer(store.objects["parquet/trajectories-00000.parquet"])).to_pylist()  # type: ignore[no-any-return]


def test_a_stream_with_a_damaged_record_ends_there_and_that_is_told(small_run: Any, dict_store: DictStore) -> None:
    path = f"{layout.trajectories(0)}/{layout.record(4)}"
    dict_store.objects[path] = b"?"
    done = compact(dict_store)
    (problem,) = done.problems
    assert problem.startswith(path)
    assert problem.endswith("the rest of this stream was left out")
    table = pq.read_table(pa.py_buffer(dict_store.objects["parquet/trajectories-00000.parquet"]))
    assert table["generator"].to_pylist().count(0) == 8
    assert table["generator"].to_pylist().count(1) == 36


def test_scores_of_other_rows_are_told_and_joined_to_none(start_run: Any, dict_store: DictStore) -> None:
    run = start_run(dict_store)
    run.generate(0)
    run.generate(0)
    run.score(0, 0)
    scored = StreamReader(dict_store, layout.scores("exact_match", 0, 0, 2), SCORE).next()
    assert scored is not None
    StreamWriter(dict_store, layout.scores("exact_match", 0, 1, 2), SCORE, "w").write(scored.table, tokens=0)
    done = compact(dict_store)
    assert done.problems == ["trajectories/0: the scores of part 1 belong to other rows and were left out"]
    table = pq.read_table(pa.py_buffer(dict_store.objects["parquet/trajectories-00000.parquet"]))
    assert table["status"].to_pylist() == ["ok", "ok", None, None]


def test_a_run_without_rows_makes_no_files(start_run: Any, dict_store: DictStore) -> None:
    start_run(dict_store)
    assert compact(dict_store).files == []


def test_a_place_without_a_run_is_said_to_have_none() -> None:
    with pytest.raises(RunMissing):
        compact(DictStore())
