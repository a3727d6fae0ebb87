"""The versions that the evaluate stage measures, over checkpoints and measurements that a test provides."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.evaluation.evaluated import table_of
from support.stores.dict_store import DictStore

from configs.schema import RunConfig
from millrace.evaluation.answers import read_answers
from millrace.evaluation.examiner import Stopped
from millrace.evaluation.results import read_result
from millrace.evaluation.schedule import read_early_stop
from millrace.runtime.arguments import StageArguments
from millrace.runtime.stage import Stage
from millrace.stages.evaluate import Evaluation
from millrace.training.checkpoints.names import WEIGHTS_FILE, weights_checksum
from storage import layout
from storage.checkpoints import Checkpoint, CheckpointWriter, stored_checkpoints
from storage.errors import StreamCorrupt

EVERY, LAST = 5, 100


class HurriedStage(Stage):
    """Runs the next step of its script instead of waiting; drains at the end of the script."""

    script: deque[Callable[[], object]]
    heard: list[str]

    def wait(self, until: Callable[[], bool], *, why: str) -> bool:
        while not until():
            if not self.script:
                self.draining = True
                return False
            self.script.popleft()()
        return True

    def log(self, line: str) -> None:
        self.heard.append(line)


class Bench:
    """A trainer's checkpoints and their evaluation. Version v has the accuracy `accuracies[v]`, or 0.5."""

    def __init__(self) -> None:
        self.store = DictStore()
        self.writer = CheckpointWriter(self.store)
        self.accuracies: dict[int, float] = {}
        self.measured: list[int] = []
        self.sets: dict[str, dict[str, Any]] = {}
        """Of each result."""
        self.damaged: set[int] = set()
        self.during: Callable[[], object] = lambda: None
        """Called during the next measurement."""
        self.heard: list[str] = []
        self.stage: HurriedStage

    def commit(self, *steps: int, weights: bytes = b"") -> None:
        for step in steps:
            self.writer.commit(step, {WEIGHTS_FILE: weights or str(step).encode()}, {})

    def measure(self, checkpoint: Checkpoint | None) -> tuple[dict[str, Any], pa.Table]:
        version = 0 if checkpoint is None else checkpoint.step
        if version in self.damaged:
            raise StreamCorrupt("checkpoints/data/x", "the file is missing")
        self.measured.append(version)
        during, self.during = self.during, lambda: None
        during()
        measures = {"accuracy": self.accuracies.get(version, 0.5), "prompts": 8, "sets": self.sets}
        return measures, table_of({"a prompt": [(f"of version {version}", 0.5)]})

    def evaluation(
        self, *script: Callable[[], object], sources: dict[str, Any] | None = None, **config: Any
    ) -> Evaluation:
        values = RunConfig.model_validate(
            {"training": {"max_steps": 100}, "evaluation": config, "sources": sources or {}}
        )
        arguments = StageArguments(run_url="dict://", attempt=0, replica=0, handover=Path("/nowhere"))
        self.stage = HurriedStage(name="evaluate", arguments=arguments, config=values, store=self.store)
        self.stage.script, self.stage.heard = deque(script), self.heard
        return Evaluation(self.stage, self.measure)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("millrace.stages.evaluate._POLL_SECONDS", 0.0)
    yield Bench()


def test_each_due_version_is_measured_with_its_weights_checksum(bench: Bench) -> None:
    bench.commit(0)
    bench.evaluation(*(lambda step=step: bench.commit(step) for step in range(1, 13))).follow(EVERY, LAST)
    assert bench.measured == [5, 10]
    for version, checkpoint in stored_checkpoints(bench.store).items():
        result = read_result(bench.store, version)
        if version in (5, 10):
            assert result is not None
            assert result["weights_checksum"] == weights_checksum(checkpoint)
        else:
            assert result is None


def test_the_last_version_is_measured_at_the_end(bench: Bench) -> None:
    bench.commit(5)
    bench.evaluation(lambda: bench.commit(10)).follow(EVERY, 10)
    assert bench.measured == [5]
    bench.commit(15, 18)
    bench.evaluation().finish(EVERY)
    assert bench.measured == [5, 18]
    assert any("18" in line and line.endswith("10, 15") for line in bench.heard)


def test_an_evaluation_that_falls_behind_skips_to_the_newest_version(bench: Bench) -> None:
    bench.commit(5)
    bench.during = lambda: bench.commit(10, 15, 20)
    bench.evaluation().follow(EVERY, LAST)
    assert bench.measured == [5, 20]
    assert any("20" in line and line.endswith("10, 15") for line in bench.heard)


def test_a_restarted_stage_measures_only_new_versions(bench: Bench) -> None:
    bench.commit(5, 10)
    bench.evaluation().follow(EVERY, LAST)
    bench.commit(15)
    for _ in range(2):
        bench.evaluation().follow(EVERY, LAST)
    assert bench.measured == [10, 15]


def test_each_result_names_its_answers(bench: Bench) -> None:
    bench.commit(5)
    bench.evaluation().follow(EVERY, LAST)
    result = read_result(bench.store, 5)
    assert result is not None
    answers = read_answers(bench.store, result)
    assert answers is not None
    assert answers["responses"].to_pylist() == [["of version 5"]]


def test_a_version_trained_again_is_measured_again(bench: Bench) -> None:
    bench.commit(5, 10)
    bench.evaluation().follow(EVERY, LAST)
    bench.writer = CheckpointWriter(bench.store)
    bench.commit(5)
    bench.commit(10, weights=b"others")
    bench.evaluation().follow(EVERY, LAST)
    assert bench.measured == [10, 10]
    result = read_result(bench.store, 10)
    assert result is not None
    assert result["weights_checksum"] == weights_checksum(stored_checkpoints(bench.store)[10])


def test_a_torn_result_is_measured_again(bench: Bench) -> None:
    bench.commit(5)
    bench.evaluation().follow(EVERY, LAST)
    path = layout.evaluation(5)
    bench.store.objects[path] = bench.store.objects[path][:40]
    bench.evaluation().follow(EVERY, LAST)
    assert bench.measured == [5, 5]
    assert json.loads(bench.store.objects[path])["policy_version"] == 5


def test_a_result_without_a_configured_set_is_measured_again(bench: Bench) -> None:
    bench.evaluation().measure(None)
    bench.evaluation(sets={"hard": {"source": "arithmetic"}}).measure(None)
    assert bench.measured == [0, 0]


def test_a_result_without_a_set_of_each_source_is_measured_again(bench: Bench) -> None:
    hard = {"evaluation": {"sets": {"hard": {"source": "arithmetic"}}}}
    for sources, sets in (
        ({}, []),
        ({"sums": {}}, []),
        ({"sums": {}, "chains": {}}, ["sums", "chains"]),
        ({"sums": {}, "chains": hard}, ["sums", "chains", "chains/hard"]),
    ):
        bench.sets = {name: {"accuracy": 0.5, "prompts": 8} for name in sets}
        for _ in range(2):
            bench.evaluation(sources=sources).measure(None)
    assert bench.measured == [0, 0, 0], "one source has no name of its own in results"


def test_an_unreadable_checkpoint_is_reported_once_and_skipped(bench: Bench) -> None:
    bench.damaged = {5}
    bench.commit(5)
    bench.evaluation(lambda: bench.commit(6), lambda: bench.commit(10)).follow(EVERY, LAST)
    assert bench.measured == [10]
    assert sum("version 5 " in line for line in bench.heard) == 1


def test_a_stopped_evaluation_stores_nothing(bench: Bench) -> None:
    def stop() -> None:
        raise Stopped

    bench.commit(5)
    bench.during = stop
    with pytest.raises(Stopped):
        bench.evaluation().follow(EVERY, LAST)
    assert read_result(bench.store, 5) is None


def test_an_early_stop_is_stored_when_evaluations_do_not_improve(bench: Bench) -> None:
    bench.accuracies = {0: 0.1, 5: 0.5, 10: 0.4, 15: 0.5, 20: 0.9}
    evaluation = bench.evaluation(*(lambda step=step: bench.commit(step) for step in (5, 10, 15)), stop_after=2)
    evaluation.measure(None)
    evaluation.follow(EVERY, LAST)
    stop = read_early_stop(bench.store, 0)
    assert stop is not None
    assert stop.policy_version == 15
