"""The status of a run, where not all that it is read from is there."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.stages.trainer_bench import TrainerBench
from transformers import LlamaForCausalLM

from millrace.evaluation.results import HELD_OUT, as_result, write_result
from millrace.runs.record import end_attempt, latest_attempt, resume_run
from millrace.runs.status import StatusReader
from millrace.runtime.arguments import attempt_config
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.errors import StreamCorrupt
from storage.progress import read_status, write_progress
from storage.stores.memory import MemoryStore


@pytest.fixture
def bench(memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM]) -> TrainerBench:
    """Two steps of two groups, and a fifth group that waits."""
    made = TrainerBench(memory_store, make_model, staleness={"too_old": "mask"})
    for number in range(5):
        made.commit(number, [[0, 0], [0]], [1.0, 0.0])
    assert made.train() == 2
    return made


def test_the_checkpoint_replaces_a_lost_status_record(bench: TrainerBench) -> None:
    first = StatusReader(bench.store).look()
    assert first["ledger"]["trained"] == {"rollouts": 8, "tokens": 12}
    assert first["ledger"]["buffered"] == {"rollouts": 2, "tokens": 3}
    bench.store.delete(layout.progress("train", 0))
    second = StatusReader(bench.store).look()
    for figure in ("steps", "ledger", "staleness", "tokens"):
        assert second[figure] == first[figure]


def test_a_run_that_kept_a_group_beyond_the_bound_and_masks_now_has_no_bound_of_training(bench: TrainerBench) -> None:
    assert StatusReader(bench.store).look()["staleness"]["admission_only"] is False
    bench.commit(5, [[2], [2]])
    assert bench.train() == 3
    for number, version in ((6, 0), (7, 3)):
        bench.commit(number, [[version], [version]])
    assert bench.train(too_old="keep") == 4
    staleness = StatusReader(bench.store).look()["staleness"]
    assert (staleness["max"], staleness["bound"], staleness["admission_only"]) == (3, 2, True)


def test_a_replays_checkpoint_without_an_account_counts_nothing(bench: TrainerBench) -> None:
    CheckpointWriter(bench.store).commit(3, {}, {"position": 3})
    bench.store.delete(layout.progress("train", 0))
    assert StatusReader(bench.store).look()["ledger"]["trained"] == {"rollouts": 0, "tokens": 0}


def test_tokens_are_those_that_are_committed(bench: TrainerBench) -> None:
    write_progress(bench.store, "train", 0, {**read_status(bench.store, "train", 0), "tokens": 77})
    assert StatusReader(bench.store).look()["tokens"] == {"generate": 15, "score": 15, "train": 12}


@pytest.fixture
def mixed(memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM]) -> TrainerBench:
    """Two steps of a mixture: a group of words is dropped, and the second step has none of them."""
    made = TrainerBench(
        memory_store,
        make_model,
        training={"selection": {"drop_zero_advantage": True}},
        sources={"sums": {"weight": 3}, "words": {}, "proofs": {}},
    )
    for number, (source, rewards) in enumerate(
        [
            ("sums", [1.0, 0.0]),
            ("words", [1.0, 1.0]),
            ("words", [0.5, 0.0]),
            ("sums", [1.0, 0.0]),
            ("sums", [0.0, 0.5]),
        ]
    ):
        made.commit(number, [[0], [0]], rewards, source=source)
    assert made.train() == 2
    return made


def test_each_source_of_a_mixture_has_figures(mixed: TrainerBench) -> None:
    mixed.generator(None, source_weights={"sums": 2.5, "words": 1.0}, pid=1, seconds={})
    held_out = {"accuracy": 0.5, "accuracy_interval": [0.4, 0.6], "prompts": 8, "errors": 0}
    words = {**held_out, "accuracy": 0.25}
    result = as_result({"sums": {HELD_OUT: held_out}, "words": {HELD_OUT: words}}, {"sums": 1.0})
    write_result(mixed.store, {**result, "policy_version": 2, "t": 1.0})
    sources = StatusReader(mixed.store).look()["sources"]
    names = ("weight", "groups_trained", "trained_share", "groups_dropped", "reward_mean", "accuracy")
    assert {source: [figures[name] for name in names] for source, figures in sources.items()} == {
        "sums": [2.5, 3, 0.75, 0, 0.375, 0.5],
        "words": [1.0, 1, 0.25, 1, 0.25, 0.25],
        "proofs": [None, 0, 0.0, 0, None, None],
    }
    ledger = StatusReader(mixed.store).look()["ledger"]
    for what in ("rollouts", "tokens"):
        assert sum(source["trained"][what] for source in sources.values()) == ledger["trained"][what]
    assert sources["words"]["dropped"] == ledger["dropped"] == {"zero_advantage": {"rollouts": 2, "tokens": 2}}


def test_a_run_with_one_source_has_no_figures_by_source(bench: TrainerBench) -> None:
    assert StatusReader(bench.store).look()["sources"] == {}


SCORES = layout.annotations("scores/exact_match", 0, 0, 1)


@pytest.mark.parametrize(("stream", "number"), [(layout.trajectories(0), -1), (layout.trajectories(0), 3), (SCORES, 3)])
def test_missing_commit_records_are_noticed(stream: str, number: int, bench: TrainerBench) -> None:
    bench.store.delete(sorted(bench.store.list(f"{stream}/log"))[number])
    with pytest.raises(StreamCorrupt):
        StatusReader(bench.store).look()


def test_a_run_whose_record_misses_a_setting_is_refused(bench: TrainerBench) -> None:
    values = json.loads(bytes(bench.store.get(layout.RUN)))
    del values["config"]["training"]
    bench.store.put(layout.RUN, json.dumps(values).encode())
    with pytest.raises(StreamCorrupt):
        StatusReader(bench.store)
    with pytest.raises(StreamCorrupt):
        attempt_config(latest_attempt(bench.store))


def resumed(bench: TrainerBench, minutes: float | None = None) -> dict[str, Any]:
    """The status right after the run was resumed, an hour after its trainer's last status record."""
    record = read_status(bench.store, "train", 0)
    write_progress(bench.store, "train", 0, {**record, "t": time.time() - 3600, "attempt": 0, "step_seconds": 2.0})
    config = attempt_config(latest_attempt(bench.store)).model_dump(mode="json")
    config["budget"]["duration_minutes"] = minutes
    resume_run(bench.store, config)
    return StatusReader(bench.store).look()


def test_a_run_that_was_just_resumed_is_running_and_not_ready(bench: TrainerBench) -> None:
    status = resumed(bench)
    assert status["state"] == "running"
    assert "train-0" in status["doing"]
    assert status["ready"] == {}
    record = read_status(bench.store, "train", 0)
    write_progress(bench.store, "train", 0, {**record, "t": time.time(), "attempt": 1, "t_ready": None})
    assert StatusReader(bench.store).look()["ready"] == {"train-0": False}
    write_progress(bench.store, "train", 0, {**record, "t": time.time(), "attempt": 1, "t_ready": time.time()})
    assert StatusReader(bench.store).look()["ready"] == {"train-0": True}


def test_the_time_left_is_bounded_by_steps_and_budget(bench: TrainerBench) -> None:
    status = resumed(bench)
    by_steps = 2.0 * (status["stop_at_step"] - status["steps"])
    assert status["eta_seconds"] == by_steps > 0
    assert resumed(bench, minutes=by_steps / 120)["eta_seconds"] == by_steps / 2
    end_attempt(bench.store, 2, "finished")
    assert StatusReader(bench.store).look()["eta_seconds"] is None
