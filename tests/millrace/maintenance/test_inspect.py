"""inspect summarizes a run from its records, and reports damage instead of failing."""

import json
from typing import Any

import pytest
from support.stores.dict_store import DictStore

from millrace.maintenance.gc import Retention, carry_out, plan
from millrace.maintenance.inspect import first_rows, inspect
from storage import layout
from storage.errors import StreamCorrupt
from storage.schema import TRAJECTORY
from storage.streams.stream import StreamReader


def streams(store: DictStore) -> dict[str, dict[str, Any]]:
    return {stream["name"]: stream for stream in inspect(store)["streams"]}


def test_streams_are_listed_in_the_order_rows_flow(small_run: Any, dict_store: DictStore) -> None:
    summaries = streams(dict_store)
    assert list(summaries) == [
        "trajectories/0",
        "trajectories/1",
        *(f"scores/exact_match/{generator}/{scorer}-of-2" for generator in (0, 1) for scorer in (0, 1)),
        "consumed",
        "trainer_logprobs",
        "metrics/train-0",
    ]
    reader = StreamReader(dict_store, layout.trajectories(0), TRAJECTORY)
    parts = list(iter(reader.next, None))
    summary = summaries["trajectories/0"]
    assert summary["parts"] == len(parts) == 13
    assert summary["rows"] == sum(part.table.num_rows for part in parts)
    assert summary["tokens"] == sum(len(tokens) for p in parts for tokens in p.table["response_tokens"].to_pylist())
    assert summary["bytes"] == sum(len(dict_store.objects[f"{layout.trajectories(0)}/{p.record.file}"]) for p in parts)
    assert (summary["min_policy_version"], summary["max_policy_version"]) == (0, 6)
    assert (summary["epochs"], summary["ended"], summary["problem"]) == (1, False, None)
    assert summary["t_last"] == max(entry.t_modified for entry in dict_store.entries(f"{layout.trajectories(0)}/log"))
    metrics, consumed, logprobs = (summaries[name] for name in ("metrics/train-0", "consumed", "trainer_logprobs"))
    assert (metrics["rows"], metrics["min_policy_version"]) == (6, None)
    taken = small_run.account.taken()
    assert (consumed["rows"], consumed["tokens"]) == (taken.rollouts, taken.tokens)
    assert logprobs["rows"] == small_run.account.trained.rollouts < taken.rollouts
    assert (logprobs["min_policy_version"], logprobs["max_policy_version"]) == (1, 6)


def test_checkpoints_weights_and_promoted_models_are_summarized(small_run: Any, dict_store: DictStore) -> None:
    small_run.promote()
    summary = inspect(dict_store)
    (model,) = summary["promoted"]
    assert (model["step"], model["incarnation"], model["present"]) == (small_run.version, 1, True)
    expected = [(version, 0, True) for version in range(1, 7)]
    assert [(files["step"], files["incarnation"], files["present"]) for files in summary["checkpoints"]] == expected
    assert summary["checkpoints"][0]["bytes"] == sum(
        len(f"{name} of 1".encode() * 9) for name in ("model", "optimizer")
    )
    assert [files["step"] for files in summary["weights"]] == [1, 2, 3, 4, 5, 6]
    assert summary["bytes"] == sum(map(len, dict_store.objects.values()))
    assert json.loads(json.dumps(summary))["run_id"] == "small"


def test_epochs_and_removed_parts_are_counted(small_run: Any, dict_store: DictStore) -> None:
    small_run.restart_generator(0)
    whole = streams(dict_store)["trajectories/0"]
    carry_out(dict_store, plan(dict_store, Retention(keep_age=0.0)))
    collected = streams(dict_store)["trajectories/0"]
    assert (whole["epochs"], whole["removed_parts"]) == (2, 0)
    assert collected["removed_parts"] > 2
    assert (collected["parts"], collected["rows"], collected["bytes"]) == (
        whole["parts"],
        whole["rows"],
        whole["bytes"],
    )
    assert [files["present"] for files in inspect(dict_store)["checkpoints"]] == [False] * 4 + [True] * 2


def test_records_before_a_damaged_one_are_summarized(small_run: Any, dict_store: DictStore) -> None:
    path = f"{layout.trajectories(0)}/{layout.record(5)}"
    dict_store.objects[path] = dict_store.objects[path].replace(b'"rows": ', b'"rows": 1')
    dict_store.objects["weights/log/000000000002.json"] = b"?"
    summary = inspect(dict_store)
    damaged = streams(dict_store)["trajectories/0"]
    assert damaged["parts"] == 4
    assert str(damaged["problem"]).startswith(path)
    assert [problem.partition(":")[0] for problem in summary["problems"]] == ["weights/log/000000000002.json"]
    assert summary["weights"] == []
    dict_store.objects[layout.RUN] = b"{"
    with pytest.raises(StreamCorrupt):
        inspect(dict_store)


def test_first_rows_come_from_several_parts(small_run: Any, dict_store: DictStore) -> None:
    result = first_rows(dict_store, "trajectories/1", 5)
    assert [row["row_id"] for row in result["rows"]] == [0, 1, 2, 3, 4]
    assert (list(result["rows"][0]), result["problems"]) == (TRAJECTORY.names, [])
    assert first_rows(dict_store, "streams/trajectories/1/", 1)["rows"] == result["rows"][:1]
    assert len(first_rows(dict_store, "metrics/train-0", 99)["rows"]) == 6


def test_removed_and_damaged_rows_are_skipped(small_run: Any, dict_store: DictStore) -> None:
    carry_out(dict_store, plan(dict_store, Retention(keep_age=0.0)))
    first = first_rows(dict_store, "trajectories/1", 1)["rows"][0]["row_id"]
    assert first > 0
    segment = min(path for path in dict_store.objects if path.startswith("streams/trajectories/1/seg/"))
    dict_store.objects[segment] = b"?"
    result = first_rows(dict_store, "trajectories/1", 10**6)
    (problem,) = result["problems"]
    assert problem.startswith(segment)
    assert result["rows"]
