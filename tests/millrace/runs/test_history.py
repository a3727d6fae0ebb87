"""Points of a plot over policy versions: no version twice, none that was rolled back, no idle night."""

import json

import pyarrow as pa
import pytest
from support.stores.dict_store import DictStore

from millrace.evaluation.results import ResultsReader, write_result
from millrace.runs.history import accuracies, read_steps, series, throughput
from storage import layout
from storage.schema import METRIC
from storage.streams.stream import StreamWriter


class Measured:
    """The trainer's metrics, a part a step."""

    def __init__(self) -> None:
        self.store = DictStore()
        self._stream = StreamWriter(self.store, layout.metrics("train", 0), METRIC, "train-0")

    def step(self, version: int, t: float, *, incarnation: int = 0, **values: float) -> None:
        rows = [
            {"t": t, "incarnation": incarnation, "policy_version": version, "name": name, "value": value}
            for name, value in values.items()
        ]
        self._stream.write(pa.Table.from_pylist(rows, schema=METRIC), tokens=0)


@pytest.fixture
def measured() -> Measured:
    return Measured()


def test_a_run_without_measurements_has_no_points(measured: Measured) -> None:
    assert read_steps(DictStore()) == read_steps(measured.store) == []
    assert series([], "reward_mean", 100) == throughput([], 100) == []


def test_rolled_back_versions_are_left_out(measured: Measured) -> None:
    for version in range(1, 6):
        measured.step(version, version, reward_mean=0.0)
    measured.step(3, 9.0, incarnation=1, reward_mean=1.0)
    assert series(read_steps(measured.store), "reward_mean", 100) == [(1, 0), (2, 0), (3, 1)]


def test_the_step_of_the_checkpoint_itself_stays(measured: Measured) -> None:
    for version in range(1, 6):
        measured.step(version, version, reward_mean=0.0)
    # A trainer that starts from the checkpoint of version 3 may report first where its time went.
    for name in ("time/wait/seconds", "total/tokens"):
        measured.step(3, 8.0, incarnation=1, **{name: 1.0})
    measured.step(4, 9.0, incarnation=1, reward_mean=1.0)
    assert series(read_steps(measured.store), "reward_mean", 100) == [(1, 0), (2, 0), (3, 0), (4, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("versions", [99, 101, 1001])
def test_all_versions_are_merged_into_at_most_max_points(versions: int, measured: Measured) -> None:
    for version in range(1, versions + 1):
        measured.step(version, version, lag=version)
    steps = read_steps(measured.store)
    points = series(steps, "lag", 100)
    assert min(versions, 50) <= len(points) <= 100
    assert all(version == value for version, value in points), "a point lies at the mean of its versions"
    assert series(steps, "lag", 100, max)[-1][1] == versions, "the largest is not averaged away"


def test_throughput_counts_only_time_in_which_the_trainer_ran(measured: Measured) -> None:
    for version in range(1, 4):
        measured.step(version, 2.0 * version, tokens=100)
    # A day later, the next nightly window.
    for version in range(4, 7):
        measured.step(version, 86400.0 + 4.0 * version, incarnation=1, tokens=100)
    steps = read_steps(measured.store)
    assert throughput(steps, 100) == [(2, 50), (3, 50), (5, 25), (6, 25)]
    assert throughput(steps, 1) == [(4, 400 / 12)]


def test_a_damaged_part_costs_its_own_point(measured: Measured) -> None:
    for version in range(1, 4):
        measured.step(version, version, reward_mean=version)
    records = [path for path in measured.store.objects if "/log/" in path]
    part_file = json.loads(measured.store.objects[records[2]])["file"]
    path = f"{layout.metrics('train', 0)}/{part_file}"
    measured.store.objects[path] = measured.store.objects[path][:-1] + b"?"
    assert [version for version, _ in series(read_steps(measured.store), "reward_mean", 100)] == [1, 3]


def test_every_evaluation_is_a_point_of_its_set() -> None:
    store = DictStore()
    hard = {"accuracy": 0.125, "prompts": 4}
    for version, accuracy, further in [(20, 0.5, {"sets": {"hard": hard}}), (0, 0.25, {}), (5, 0.375, {})]:
        measured = {"accuracy": accuracy, "accuracy_interval": [accuracy - 0.125, 1.0], "prompts": 8}
        write_result(store, {"policy_version": version, **measured, "t": 50.0, **further})
    results = ResultsReader(store).read()
    by_set = accuracies(results, 100)
    points = [(version, measures["accuracy_interval"]) for version, measures in by_set["held_out"]]
    assert points == [(0, [0.125, 1.0]), (5, [0.25, 1.0]), (20, [0.375, 1.0])]
    assert by_set["hard"] == [(20, hard)]
    assert [version for version, _ in accuracies(results, 2)["held_out"]] == [5, 20]
    assert accuracies([], 100) == {}
