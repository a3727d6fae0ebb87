"""The runs below a root: which there are, how each is doing, and that nothing else can be reached."""

import json
import shutil
import time
from dataclasses import fields
from pathlib import Path

import pytest
from support.pages.sites import HandClock, store_run
from support.stored_run.run import Shape, StoredRun
from support.stores.s3_server import S3Server, aws_environment

from dashboard.queries.verdict.facts import read_facts
from dashboard.read.model import OverviewRow, Recent
from dashboard.read.runs import Runs
from millrace.errors import InputError
from millrace.evaluation.results import write_result
from millrace.runs.record import read_run, resume_run
from storage import layout
from storage.errors import StoreRefused, StreamCorrupt
from storage.progress import read_progress, read_status, write_progress
from storage.stores.local import LocalStore
from storage.stores.object_store import ObjectStore

SHAPE = Shape(steps=10)


def rows(runs: Runs) -> dict[str, OverviewRow]:
    return {row.run_id: row for row in runs.overview()}


def test_a_root_has_the_runs_that_lie_directly_below_it(tmp_path: Path) -> None:
    for run_id in ("b", "a.1", "-c"):
        store_run(tmp_path, run_id)
    (tmp_path / "a file").write_text("x")
    for other in (".probe-1", "_x", "with space", "ü", "b/deeper"):
        (tmp_path / other).mkdir()
    runs = Runs(str(tmp_path))
    assert runs.ids() == ["-c", "a.1", "b"]
    assert [row.run_id for row in runs.overview()] == runs.ids()
    assert runs.reader("b").look().info.run_id == "b"
    assert runs.url == str(tmp_path)


def test_the_url_of_a_run_is_that_run_alone_also_where_it_was_moved_to(tmp_path: Path) -> None:
    store_run(tmp_path, "b")
    (tmp_path / "b").rename(tmp_path / "c")
    runs = Runs(str(tmp_path / "c"))
    assert runs.ids() == ["b"]
    assert runs.reader("b").look().info.run_id == "b"
    assert rows(runs)["b"].policy_version == 3


def test_a_root_may_be_empty_or_not_there_yet_and_fill_later(tmp_path: Path, clock: HandClock) -> None:
    runs = Runs(str(tmp_path / "later"), clock)
    assert runs.ids() == runs.overview() == []
    store_run(tmp_path / "later", "first")
    clock.now += 2.0
    assert runs.ids() == ["first"]
    assert [row.run_id for row in runs.overview()] == ["first"]


def test_what_is_no_run_id_of_this_root_can_not_be_reached(tmp_path: Path) -> None:
    store_run(tmp_path / "root", "a")
    store_run(tmp_path, "b")
    runs = Runs(str(tmp_path / "root"))
    assert runs.reader("a") is runs.reader("a")
    for run_id in ("..", "../a", "a/../a", "/etc", "", "a/seg", ".", "b", "a\0", "%2e%2e"):
        with pytest.raises(KeyError):
            runs.reader(run_id)


def test_a_run_made_anew_under_an_old_name_is_read_anew(tmp_path: Path, clock: HandClock) -> None:
    store_run(tmp_path, "a")
    runs = Runs(str(tmp_path), clock)
    original = runs.reader("a")
    assert original.look().consumed["policy_version"].max() == 3
    shutil.rmtree(tmp_path / "a")
    clock.now += 2.0
    assert runs.ids() == []
    with pytest.raises(KeyError):
        runs.reader("a")
    store_run(tmp_path, "a", steps=1)
    clock.now += 2.0
    assert runs.reader("a").look().consumed["policy_version"].max() == 1


def test_a_row_says_how_a_run_is_doing_and_reads_no_stream(tmp_path: Path) -> None:
    store_run(tmp_path, "a", 9, SHAPE)
    shutil.rmtree(tmp_path / "a" / "streams")
    status = read_status(LocalStore(tmp_path / "a"), "train", 0)
    histogram = {int(staleness): count for staleness, count in status["account"]["staleness"].items()}
    earlier = time.time()
    row = rows(Runs(str(tmp_path)))["a"]
    assert row.problem is None
    assert (row.state, row.policy_version, row.max_steps, row.max_staleness) == ("running", 9, 10, 4)
    assert row.staleness_mean == sum(status["recent"]["staleness_mean"]) / len(status["recent"]["staleness_mean"])
    assert row.staleness_max == max(histogram) > 0
    assert set(row.ages) == {"generate", "score", "train", "sync_weights"}
    assert earlier - status["t"] <= row.ages["train"] <= time.time() - status["t"]


def test_a_row_and_the_pages_of_the_run_have_the_same_figures(tmp_path: Path) -> None:
    shape = Shape(steps=30, stale_share=0.2)
    store_run(tmp_path, "a", 30, shape)
    runs = Runs(str(tmp_path))
    row, facts = rows(runs)["a"], read_facts(runs.reader("a").look())
    names = [each.name for each in fields(Recent)]
    assert [getattr(row, name) for name in names] == [getattr(facts, name) for name in names]
    assert row.dropped_share


def test_a_row_has_the_first_start_the_time_it_ran_and_the_newest_accuracy(tmp_path: Path, clock: HandClock) -> None:
    run = store_run(tmp_path, "a")
    for version, accuracy in ((0, 0.25), (2, 0.5)):
        write_result(run.store, {"policy_version": version, "accuracy": accuracy, "prompts": 64, "t": 1.0})
    newest = max(status["t"] for status in read_progress(run.store).values())
    runs = Runs(str(tmp_path), clock)
    row = rows(runs)["a"]
    assert (row.accuracy, row.accuracy_version, list(row.missing)) == (0.5, 2, [])
    assert row.t_started is not None
    assert row.wall_seconds == max(0.0, newest - row.t_started)
    run.store.put(layout.ended(0), json.dumps({"state": "stopped", "t": newest}).encode())
    record = read_run(run.store)
    resume_run(run.store, record["config"])
    late = {**json.loads(bytes(run.store.get(layout.attempt(1)))), "t_started": newest + 9000}
    run.store.put(layout.attempt(1), json.dumps(late).encode())
    alive = {**read_status(run.store, "train", 0), "t": newest + 9060, "attempt": 1}
    write_progress(run.store, "train", 0, alive)
    clock.now += 2.0
    again = rows(runs)["a"]
    assert again.t_started == row.t_started
    assert again.wall_seconds == pytest.approx(row.wall_seconds + 60)


def test_what_is_damaged_of_a_run_is_named_and_the_rest_of_its_row_is_there(tmp_path: Path) -> None:
    run = store_run(tmp_path, "a")
    for version, accuracy in ((0, 0.25), (2, 0.5)):
        write_result(run.store, {"policy_version": version, "accuracy": accuracy, "prompts": 64, "t": 1.0})
    run.store.put(layout.evaluation(2), b'{"policy_')
    run.finish()
    run.store.delete(layout.progress("train", 0))
    row = rows(Runs(str(tmp_path)))["a"]
    assert (row.problem, row.state, row.max_steps, row.policy_version) == (None, "finished", 6, None)
    assert (row.accuracy, row.accuracy_version) == (0.25, 0)
    trainer, evaluation = row.missing
    assert layout.progress("train", 0) in trainer
    assert layout.evaluation(2) in evaluation


def test_a_run_that_ended_or_fell_silent_says_so(tmp_path: Path, clock: HandClock) -> None:
    finished, silent = store_run(tmp_path, "finished"), store_run(tmp_path, "silent")
    finished.finish()
    for stage in ("generate", "score", "train", "sync_weights"):
        for replica in range(2 if stage == "generate" else 1):
            status = read_status(silent.store, stage, replica)
            write_progress(silent.store, stage, replica, {**status, "t": time.time() - 1000})
    started = {**read_run(silent.store), "t_started": time.time() - 2000}
    silent.store.put(layout.RUN, json.dumps(started).encode())
    runs = Runs(str(tmp_path), clock)
    assert {run_id: row.state for run_id, row in rows(runs).items()} == {"finished": "finished", "silent": "killed"}
    resume_run(finished.store, read_run(finished.store)["config"])
    clock.now += 2.0
    assert rows(runs)["finished"].state == "running"


def test_a_run_that_can_not_be_read_is_a_row_with_a_problem_and_the_others_are_shown(
    tmp_path: Path, clock: HandClock
) -> None:
    store_run(tmp_path, "fine")
    for run_id in ("creating", "torn"):
        (tmp_path / run_id).mkdir()
    (tmp_path / "torn" / layout.RUN).write_text('{"run_id": "to')
    strange = store_run(tmp_path, "strange")
    write_progress(strange.store, "train", 0, {"account": [], "t": None})
    store_run(tmp_path, "attempt").store.put(layout.attempt(1), b'{"number": 1}')
    runs = Runs(str(tmp_path), clock)
    result = rows(runs)
    assert result["fine"].problem is None
    assert result["creating"].problem is not None
    assert layout.RUN in str(result["torn"].problem)
    assert result["strange"].problem is not None
    assert layout.attempt(1) in str(result["attempt"].problem)
    with pytest.raises(StreamCorrupt):
        runs.reader("torn")
    (tmp_path / "creating" / layout.RUN).write_bytes((tmp_path / "fine" / layout.RUN).read_bytes())
    clock.now += 1.0
    assert rows(runs)["creating"].problem is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy_version": "3"},
        {"recent": {"loss": ["high"]}},
        {"reward_curve": [[1, "high"]]},
        {"reward_curve": None},
        {"recent": 7},
        {"collapse": {}},
        {"zero_advantage_share": "many"},
        {"account": None},
        {"seconds": 3},
        {"t": None},
    ],
)
def test_a_value_of_another_type_is_a_problem_of_its_run_alone(tmp_path: Path, wrong: dict[str, object]) -> None:
    run = store_run(tmp_path, "a")
    store_run(tmp_path, "fine")
    write_progress(run.store, "train", 0, {**read_status(run.store, "train", 0), **wrong})
    result = rows(Runs(str(tmp_path)))
    assert result["fine"].problem is None
    assert result["a"].problem is not None


def test_a_url_of_no_store_and_a_file_are_refused(tmp_path: Path) -> None:
    for url in ("ftp://host/x", "", "s3://", "gs://bucket/x"):
        with pytest.raises(StoreRefused):
            Runs(url)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError):
        Runs(str(tmp_path / "file"))


@pytest.mark.slow
def test_runs_in_a_bucket_are_found_too(moto_s3: S3Server) -> None:
    with aws_environment(moto_s3.environment):
        bucket = moto_s3.make_bucket()
        for run_id in ("one", "two"):
            StoredRun(ObjectStore(f"s3://{bucket}/team/{run_id}"), run_id, Shape(steps=3)).append(1)
        runs = Runs(f"s3://{bucket}/team")
        assert runs.ids() == ["one", "two"]
        assert rows(runs)["two"].policy_version == 1
        assert runs.reader("one").look().consumed["policy_version"].max() == 1
        assert Runs(f"s3://{bucket}/team/one").ids() == ["one"]
