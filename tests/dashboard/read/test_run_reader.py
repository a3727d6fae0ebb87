"""A run is read whole, then only its new parts; where something is damaged, the rest is read."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.stored_run.run import Shape, StoredRun
from support.stores.dict_store import DictStore
from support.stores.faulty_store import flipped
from support.stores.slow_store import SlowStore
from support.streams.rows import part_files, read_rows

from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from millrace.errors import RunMissing
from millrace.evaluation.promotion import PromotionDecision, write_decision
from millrace.evaluation.results import write_result
from millrace.rollouts.ledger import Account
from millrace.runs.provenance import Origin
from millrace.runs.record import AttemptEnd, end_attempt, read_run, resume_run
from storage import layout
from storage.errors import StoreUnreachable, StreamCorrupt
from storage.progress import read_status, write_progress
from storage.schema import CONSUMED, METRIC
from storage.stores.base import Store
from storage.streams.merged import EVERY, merge_parts
from storage.streams.stream import write_removed

Look = Callable[[], RunData]
Watch = Callable[[Store], Look]


def damage(store: DictStore, file: str) -> None:
    store.objects[file] = flipped(store.objects[file], 8 * len(store.objects[file]) - 1)


def test_every_row_and_measurement_is_what_the_streams_hold(
    stored_run: StoredRun, dict_store: DictStore, watch: Watch
) -> None:
    data = watch(dict_store)()
    rows = read_rows(dict_store, layout.CONSUMED, CONSUMED)
    assert [data.consumed.outcomes[code] for code in data.consumed["outcome"]] == [row["outcome"] for row in rows]
    assert {row["outcome"] for row in rows} == {"trained", "stale", "error"}, "the run has some of each"
    assert [data.consumed.sources[code] for code in data.consumed["source"]] == [row["source"] for row in rows]
    assert [data.consumed.prompts[code] for code in data.consumed["prompt_id"]] == [row["prompt_id"] for row in rows]
    for name in set(CONSUMED.names) - {"outcome", "source", "prompt_id"}:
        expected = [np.nan if row[name] is None else row[name] for row in rows]
        np.testing.assert_array_equal(data.consumed[name], np.array(expected, data.consumed[name].dtype), name)
    assert data.trained.sum() == sum(row["outcome"] == "trained" for row in rows)
    assert set(data.metrics) == {"generate-0", "generate-1", "score-0", "score-1", "train-0", "sync_weights-0"}
    for replica, by_name in data.metrics.items():
        stage, _, number = replica.rpartition("-")
        measured = read_rows(dict_store, layout.metrics(stage, int(number)), METRIC)
        assert measured
        assert set(by_name) == {row["name"] for row in measured}
        for name, columns in by_name.items():
            for key in ("t", "incarnation", "policy_version", "value"):
                assert columns[key].tolist() == [row[key] for row in measured if row["name"] == name]
    assert data.problems == ()


def test_record_status_and_evaluations_of_all_sets_are_read_too(
    stored_run: StoredRun, dict_store: DictStore, watch: Watch
) -> None:
    hard = {"accuracy": 0.125, "accuracy_interval": [0.0625, 0.25], "prompts": 64}
    held_out = {"accuracy": 0.75, "accuracy_interval": [0.5, 1.0], "prompts": 128}
    write_result(dict_store, {"policy_version": 6, **held_out, "t": 50.0, "sets": {"hard": hard}})
    dict_store.put(layout.evaluation(5), b'{"policy_version": 5}')
    data = watch(dict_store)()
    assert (data.info.run_id, data.info.url, len(data.info.attempts)) == ("small", dict_store.url, 1)
    assert data.info.attempts[0].max_staleness == 2
    assert data.status is not None
    assert data.status["ledger"]["trained"]["rollouts"] == data.trained.sum()
    assert data.evaluations["policy_version"].tolist() == [0, 6, 8]
    assert data.evaluations["accuracy"].tolist() == [0.25, 0.75, 0.5]
    assert data.evaluations["accuracy_low"][1] == 0.5
    columns = {name: column.tolist() for name, column in data.evaluation_sets["hard"].items()}
    assert (columns["policy_version"], columns["accuracy"], columns["accuracy_high"]) == ([6], [0.125], [0.25])
    assert any(layout.evaluation(5) in problem for problem in data.problems)


def test_a_look_reads_no_part_twice(watch: Watch) -> None:
    store = SlowStore()
    run = StoredRun(store, "small", Shape(steps=9))
    run.append(5)
    look = watch(store)
    rows_before = len(look().recent["t"])
    store.gets.clear()
    run.append(1)
    rows_after = len(look().recent["t"])
    assert rows_after > rows_before
    read = [path for path in store.gets if "/seg/" in path]
    assert [path for path in read if path.startswith(layout.CONSUMED)] == [part_files(store, layout.CONSUMED)[5]]
    assert not any(path.startswith(("streams/trajectories", "streams/scores", "streams/trainer")) for path in read)
    assert len(read) == len(set(read))
    store.gets.clear()
    look()
    assert not [path for path in store.gets if "/seg/" in path]


def test_two_looks_at_about_the_same_time_are_one(stored_run: StoredRun, dict_store: DictStore) -> None:
    now = [10.0]
    reader = RunReader(dict_store, lambda: now[0])
    first = reader.look()
    now[0] += 0.29
    assert reader.look() is first
    now[0] += 0.02
    assert reader.look() is not first


def test_a_damaged_part_is_named_and_the_rest_is_shown(
    stored_run: StoredRun, dict_store: DictStore, watch: Watch
) -> None:
    whole = watch(dict_store)()
    versions = set(whole.consumed["policy_version"])
    file = part_files(dict_store, layout.CONSUMED)[3]
    damage(dict_store, file)
    look = watch(dict_store)
    data = look()
    [problem] = data.problems
    assert file in problem
    assert "checksum" in problem
    assert versions - set(data.consumed["policy_version"]) == {4}
    assert data.metrics["train-0"].keys() == whole.metrics["train-0"].keys()
    stored_run.append(1)
    again = look()
    assert again.problems == (problem,)
    assert again.consumed["policy_version"].max() == 9


def test_of_many_damaged_parts_a_few_are_named_and_the_others_counted(
    stored_run: StoredRun, dict_store: DictStore, watch: Watch
) -> None:
    for file in part_files(dict_store, layout.CONSUMED)[:7]:
        damage(dict_store, file)
    data = watch(dict_store)()
    assert len(data.problems) == 6
    assert "2 more parts" in data.problems[-1]
    assert set(data.consumed["policy_version"]) == {8}


def test_parts_that_gc_removed_are_one_problem(stored_run: StoredRun, dict_store: DictStore, watch: Watch) -> None:
    path = layout.metrics("score", 0)
    for file in part_files(dict_store, path)[:3]:
        dict_store.delete(file)
    write_removed(dict_store, path, parts=3, why="a test")
    data = watch(dict_store)()
    assert len(data.problems) == 1
    assert data.metrics["score-0"]["time/score/seconds"]["policy_version"].tolist() == [4, 5, 6, 7, 8]


def test_behind_a_damaged_record_a_stream_is_not_shown_but_all_others_are(
    stored_run: StoredRun, dict_store: DictStore, watch: Watch
) -> None:
    record = f"{layout.CONSUMED}/{layout.record(5)}"
    damage(dict_store, record)
    look = watch(dict_store)
    for _ in range(2):
        data = look()
        [problem] = data.problems
        assert record in problem
        assert set(data.consumed["policy_version"]) == {1, 2, 3, 4}
        assert data.metrics["train-0"]["loss"]["policy_version"].tolist() == list(range(1, 9))
        assert data.status is not None


def unbalanced(store: DictStore) -> dict[str, Any]:
    status = read_status(store, "train", 0)
    account = Account.from_json(status["account"])
    account.trained += account.trained
    return {**status, "account": account.to_json()}


@pytest.mark.parametrize("status", [unbalanced, {"account": 7}, {"account": {"trained": {}}, "t": "now"}])
def test_a_ledger_that_does_not_balance_or_cannot_be_read_is_a_problem_and_no_status(
    status: Any, stored_run: StoredRun, dict_store: DictStore, watch: Watch
) -> None:
    write_progress(dict_store, "train", 0, status(dict_store) if callable(status) else status)
    data = watch(dict_store)()
    assert (data.status, len(data.problems)) == (None, 1)
    assert data.trained.any()


def test_a_store_that_fails_for_a_moment_costs_no_row(watch: Watch) -> None:
    store = SlowStore()
    run = StoredRun(store, "small", Shape(steps=9))
    run.append(5)
    whole = watch(store)()
    look = watch(store)
    failing = [part_files(store, layout.CONSUMED)[2], part_files(store, layout.metrics("train", 0))[4]]
    store.failing = {path: StoreUnreachable(f"no answer for {path}") for path in failing}
    data = look()
    assert store.failing == {}, "both faults struck"
    assert data.problems == tuple(f"no answer for {path}" for path in failing)
    assert set(data.recent["policy_version"]) == {1, 2}
    data = look()
    assert data.problems == ()
    assert data.consumed["policy_version"].tolist() == whole.consumed["policy_version"].tolist()
    assert data.metrics["train-0"]["loss"]["value"].tolist() == whole.metrics["train-0"]["loss"]["value"].tolist()


def test_a_run_that_is_resumed_while_we_look_has_another_attempt(
    stored_run: StoredRun, dict_store: DictStore, watch: Watch
) -> None:
    look = watch(dict_store)
    assert [attempt.end for attempt in look().info.attempts] == [None]
    end_attempt(dict_store, 0, "stopped")
    assert [attempt.end for attempt in look().info.attempts] == [AttemptEnd(state="stopped")]
    config = read_run(dict_store)["config"]
    config["training"]["max_steps"] = 40
    resume_run(dict_store, config)
    facts = look().info
    assert [(attempt.number, attempt.first_step, attempt.end) for attempt in facts.attempts] == [
        (0, 0, AttemptEnd(state="stopped")),
        (1, 8, None),
    ]
    assert facts.config["training"]["max_steps"] == 40


def test_a_run_in_which_nothing_has_happened_yet_is_empty(dict_store: DictStore, watch: Watch) -> None:
    StoredRun(dict_store, "new", Shape(steps=3))
    data = watch(dict_store)()
    assert data.problems == ()
    assert len(data.consumed["t"]) == len(data.evaluations["accuracy"]) == 0
    assert data.metrics["train-0"] == {}
    assert data.consumed.outcomes == ("trained",)


def test_a_store_without_a_run_is_refused(dict_store: DictStore) -> None:
    with pytest.raises(RunMissing):
        RunReader(dict_store)


TORN = [b"", b"[]", b"{}", b'{"run_id": "x", "config": {}}', b"\xff"]
ODD_ORIGINS: list[dict[str, Any]] = [{"origin": 7}, {"origin": {"changes": {"seed": [0]}}}, {"origin": {"other": 7}}]


@pytest.mark.parametrize("record", [*TORN, *ODD_ORIGINS])
def test_a_run_whose_record_is_torn_or_not_millraces_is_named_as_damaged(record: Any, dict_store: DictStore) -> None:
    StoredRun(dict_store, "small", Shape(steps=2))
    if isinstance(record, dict):
        record = json.dumps({**read_run(dict_store), **record}).encode()
    dict_store.put(layout.RUN, record)
    with pytest.raises(StreamCorrupt) as damaged:
        RunReader(dict_store)
    assert damaged.value.file == layout.RUN


def test_an_attempt_tells_its_origin_and_what_became_of_its_last_version(
    stored_run: StoredRun, dict_store: DictStore, watch: Watch
) -> None:
    record = read_run(dict_store)
    record["origin"] = {"preset": "tiny-cpu", "changes": {"seed": [0, 1]}, "flow_run": "http://prefect/1"}
    dict_store.put(layout.RUN, json.dumps(record).encode())
    look = watch(dict_store)
    attempt = look().info.attempts[0]
    assert attempt.origin == Origin(preset="tiny-cpu", changes={"seed": [0, 1]}, flow_run="http://prefect/1")
    assert attempt.promotion is None
    decision = PromotionDecision(promoted=True, policy_version=8, accuracy=0.5, sentence="better", bar=0.25)
    write_decision(dict_store, 0, decision)
    stored_run.finish()
    assert look().info.attempts[0].promotion == decision


def test_a_look_reads_only_the_newest_rows_of_a_long_run(dict_store: DictStore) -> None:
    StoredRun(dict_store, "mine", Shape(steps=60)).append(60)
    store = SlowStore(dict_store.objects)
    data = RunReader(store).look()
    assert set(data.recent["policy_version"]) == set(range(51, 61))
    consumed = part_files(dict_store, layout.CONSUMED)
    assert not set(store.gets) & set(consumed[:39])
    assert set(data.consumed["policy_version"]) == set(range(1, 61)), "a page asks for all rows"
    assert set(consumed) <= set(store.gets)
    for name, column in data.recent.items():
        if name not in ("outcome", "source", "prompt_id"):
            np.testing.assert_array_equal(column, data.consumed[name][-len(column) :], name)


def test_merged_metrics_are_those_of_the_stream(dict_store: DictStore) -> None:
    StoredRun(dict_store, "mine", Shape(steps=EVERY + 4)).append(EVERY + 4)
    before = RunReader(dict_store).look().metrics["train-0"]
    merge_parts(dict_store, layout.metrics("train", 0), layout.merged_metrics("train", 0), METRIC, "train-0")
    after = RunReader(dict_store).look().metrics["train-0"]
    assert list(after) == list(before)
    for name, columns in before.items():
        for key, values in columns.items():
            np.testing.assert_array_equal(after[name][key], values, name)
