"""The trainer's steps: no version twice, none that was rolled back, no idle night."""

import json

import pyarrow as pa
import pytest
from support.stores.dict_store import DictStore

from millrace.runs.history import read_steps, tokens_per_second
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


def rewards(measured: Measured) -> list[tuple[int, float]]:
    steps = read_steps(measured.store)
    return [(step.policy_version, step.values["reward_mean"]) for step in steps]


def test_a_run_without_measurements_has_no_steps(measured: Measured) -> None:
    assert read_steps(DictStore()) == read_steps(measured.store) == []
    assert tokens_per_second([]) is None


def test_rolled_back_versions_are_left_out(measured: Measured) -> None:
    for version in range(1, 6):
        measured.step(version, version, reward_mean=0.0)
    measured.step(3, 9.0, incarnation=1, reward_mean=1.0)
    assert rewards(measured) == [(1, 0), (2, 0), (3, 1)]


def test_the_step_of_the_checkpoint_itself_stays(measured: Measured) -> None:
    for version in range(1, 6):
        measured.step(version, version, reward_mean=0.0)
    # A trainer that starts from the checkpoint of version 3 may report first where its time went.
    for name in ("time/wait/seconds", "total/tokens"):
        measured.step(3, 8.0, incarnation=1, **{name: 1.0})
    measured.step(4, 9.0, incarnation=1, reward_mean=1.0)
    assert rewards(measured) == [(1, 0), (2, 0), (3, 0), (4, 1)]


def test_throughput_counts_only_time_in_which_the_trainer_ran(measured: Measured) -> None:
    for version in range(1, 4):
        measured.step(version, 2.0 * version, tokens=100)
    # A day later, the next nightly window.
    for version in range(4, 7):
        measured.step(version, 86400.0 + 4.0 * version, incarnation=1, tokens=100)
    assert tokens_per_second(read_steps(measured.store)) == 400 / 12


def test_a_damaged_part_costs_its_own_step(measured: Measured) -> None:
    for version in range(1, 4):
        measured.step(version, version, reward_mean=version)
    records = [path for path in measured.store.objects if "/log/" in path]
    part_file = json.loads(measured.store.objects[records[2]])["file"]
    path = f"{layout.metrics('train', 0)}/{part_file}"
    measured.store.objects[path] = measured.store.objects[path][:-1] + b"?"
    assert [version for version, _ in rewards(measured)] == [1, 3]
