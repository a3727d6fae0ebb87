"""inspect sums a run up from its records, and says what is damaged instead of failing at it."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from support.stores.dict_store import DictStore

from millrace.maintenance.gc import Retention, carry_out, plan
from millrace.maintenance.inspect import StreamSummary, first_rows, inspect
from storage import layout
from storage.errors import StreamCorrupt
from storage.schema import TRAJECTORY
from storage.streams.stream import StreamReader


def streams(store: DictStore) -> dict[str, StreamSummary]:
    return {stream.name: stream for stream in inspect(store).streams}


def test_streams_are_summed_as_they_were_written_and_told_in_the_order_rows_flow(
    small_run: Any, dict_store: DictStore
) -> None:
    found = streams(dict_store)
    assert list(found) == [
        "trajectories/0",
        "trajectories/1",
        *(f"scores/exact_match/{generator}/{scorer}-of-2" for generator in (0, 1) for scorer in (0, 1)),
        "consumed",
        "trainer_logprobs",
        "metrics/train-0",
    ]
    reader = StreamReader(dict_store, layout.trajectories(0), TRAJECTORY)
    parts = list(iter(reader.next, None))
    summary = found["trajectories/0"]
    assert summary.parts == len(parts) == 13
    assert summary.rows == sum(part.table.num_rows for part in parts)
    assert summary.tokens == sum(len(tokens) for p in parts for tokens in p.table["response_tokens"].to_pylist())
    assert summary.bytes == sum(len(dict_store.objects[f"{layout.trajectories(0)}/{p.record.file}"]) for p in parts)
    assert (summary.min_policy_version, summary.max_policy_version) == (0, 6)
    assert (summary.epochs, summary.ended, summary.problem) == (1, False, None)
    assert summary.t_first is not None
    assert summary.t_last is not None
    assert summary.t_first <= summary.t_last
    assert (found["metrics/train-0"].rows, found["metrics/train-0"].min_policy_version) == (6, None)
    taken = small_run.account.taken()
    assert (found["consumed"].rows, found["consumed"].tokens) == (taken.rollouts, taken.tokens)
    assert found["trainer_logprobs"].rows == small_run.account.trained.rollouts < taken.rollouts
    assert (found["trainer_logprobs"].min_policy_version, found["trainer_logprobs"].max_policy_version) == (1, 6)


def test_checkpoints_weights_and_staleness_are_told(small_run: Any, dict_store: DictStore) -> None:
    small_run.promote()
    summary = inspect(dict_store)
    (model,) = summary.promoted
    assert (model.step, model.incarnation, model.present) == (small_run.version, 1, True)
    assert [(one.step, one.incarnation, one.present) for one in summary.checkpoints] == [
        (v, 0, True) for v in range(1, 7)
    ]
    assert summary.checkpoints[0].bytes == sum(len(f"{name} of 1".encode() * 9) for name in ("model", "optimizer"))
    assert [one.step for one in summary.weights] == [1, 2, 3, 4, 5, 6]
    assert summary.staleness == dict(small_run.account.staleness)
    assert summary.bytes == sum(map(len, dict_store.objects.values()))
    assert json.loads(json.dumps(asdict(summary)))["run_id"] == "small"


def test_a_restarted_and_collected_stream_says_so(small_run: Any, dict_store: DictStore) -> None:
    small_run.restart_generator(0)
    before = streams(dict_store)["trajectories/0"]
    carry_out(dict_store, plan(dict_store, Retention(keep_age=0.0)))
    after = streams(dict_store)["trajectories/0"]
    assert (before.epochs, before.removed_parts) == (2, 0)
    assert after.removed_parts > 2
    assert (after.parts, after.rows, after.bytes) == (before.parts, before.rows, before.bytes)
    assert [one.present for one in inspect(dict_store).checkpoints] == [False] * 4 + [True] * 2


def test_a_damaged_record_is_told_and_the_rest_is_still_summed(small_run: Any, dict_store: DictStore) -> None:
    path = f"{layout.trajectories(0)}/{layout.record(5)}"
    dict_store.objects[path] = dict_store.objects[path].replace(b'"rows": ', b'"rows": 1')
    dict_store.objects["weights/log/000000000002.json"] = b"?"
    summary = inspect(dict_store)
    damaged = next(stream for stream in summary.streams if stream.name == "trajectories/0")
    assert damaged.parts == 4
    assert damaged.problem is not None
    assert damaged.problem.startswith(path)
    assert [problem.partition(":")[0] for problem in summary.problems] == ["weights/log/000000000002.json"]
    assert summary.weights == []


def test_a_damaged_run_record_is_named(small_run: Any, dict_store: DictStore) -> None:
    dict_store.objects[layout.RUN] = b"{"
    with pytest.raises(StreamCorrupt):
        inspect(dict_store)


def test_the_first_rows_come_from_as_many_parts_as_it_takes(small_run: Any, dict_store: DictStore) -> None:
    found = first_rows(dict_store, "trajectories/1", 5)
    assert [row["row_id"] for row in found.rows] == [0, 1, 2, 3, 4]
    assert list(found.rows[0]) == TRAJECTORY.names
    assert found.problems == []
    assert first_rows(dict_store, "streams/trajectories/1/", 1).rows == found.rows[:1]
    assert len(first_rows(dict_store, "metrics/train-0", 99).rows) == 6


def test_rows_that_are_removed_or_damaged_are_passed(small_run: Any, dict_store: DictStore) -> None:
    carry_out(dict_store, plan(dict_store, Retention(keep_age=0.0)))
    first = first_rows(dict_store, "trajectories/1", 1).rows[0]["row_id"]
    assert first > 0
    segment = min(path for path in dict_store.objects if path.startswith("streams/trajectories/1/seg/"))
    dict_store.objects[segment] = b"?"
    found = first_rows(dict_store, "trajectories/1", 10**6)
    (problem,) = found.problems
    assert problem.startswith(segment)
    assert found.rows
