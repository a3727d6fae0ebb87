"""Rows that trainers wrote: tables grow, and the steps of a restarted trainer replace earlier ones."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores.dict_store import DictStore

from dashboard.read.streams import Codes, ConsumedRows, GrowingColumns, MetricRows
from millrace.rollouts.lineage import surviving
from storage import layout
from storage.schema import CONSUMED, METRIC
from storage.streams.stream import StreamWriter


def columns(first: int, rows: int) -> dict[str, np.ndarray]:
    return {"a": np.arange(first, first + rows), "b": np.arange(first, first + rows) / 2}


def test_a_view_stays_as_it_was_while_rows_come_and_go() -> None:
    growing = GrowingColumns({"a": np.int64, "b": np.float64})
    growing.append(columns(0, 10))
    earlier = growing.view()
    growing.append(columns(10, 5))
    growing.keep(growing.view()["a"] % 2 == 0)
    growing.append(columns(100, 10))
    assert earlier["a"].tolist() == list(range(10))
    assert growing.view()["a"].tolist() == [*range(0, 15, 2), *range(100, 110)]
    assert growing.view()["b"].tolist() == [value / 2 for value in [*range(0, 15, 2), *range(100, 110)]]


def test_strings_keep_their_code_from_one_column_to_the_next() -> None:
    codes = Codes("trained")
    assert codes.values == ("trained",)
    assert codes.encode(pa.chunked_array([["stale"], ["trained", "stale"]])).tolist() == [1, 0, 1]
    assert codes.encode(pa.chunked_array([["error", "stale"]])).tolist() == [2, 1]
    assert codes.values == ("trained", "stale", "error")
    assert codes.encode(pa.chunked_array([[]], pa.string())).tolist() == []


STARTS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=5)
"""Of each trainer: how many steps behind its predecessor's newest it begins, and how many it makes."""


def spans(starts: list[tuple[int, int]]) -> list[tuple[int, range]]:
    """The incarnation of each trainer and the versions it makes."""
    result: list[tuple[int, range]] = []
    newest = 0
    for incarnation, (behind, steps) in enumerate(starts):
        checkpoint = max(0, newest - behind)
        result.append((incarnation, range(checkpoint + 1, checkpoint + 1 + steps)))
        newest = checkpoint + steps
    return result


class Stored:
    """The trainer's two streams, a part a step."""

    def __init__(self) -> None:
        self.store = DictStore()
        self._consumed = StreamWriter(self.store, layout.CONSUMED, CONSUMED, "train-0")
        self._metrics = StreamWriter(self.store, layout.metrics("train", 0), METRIC, "train-0")

    def begin(self, incarnation: int, version: int) -> None:
        """A trainer that starts from the checkpoint of `version` says first what its time went into."""
        self._measure(incarnation, version, {"time/loading/seconds": 0.5, "total/tokens": 1.0})

    def step(self, incarnation: int, version: int) -> None:
        row = {
            "t": 1.0,
            "incarnation": incarnation,
            "policy_version": version,
            "generator": 0,
            "trajectory_row_id": version,
            "group_id": version,
            "source": "default",
            "prompt_id": f"prompt-{version}",
            "sample_index": 0,
            "outcome": "trained",
            "staleness": 0,
            "staleness_in_flight": 0,
            "min_policy_version": version - 1,
            "max_policy_version": version - 1,
            "tokens": 3,
            "reward": None if version % 2 else 1.0,
            "advantage": 0.5,
            "masked_tokens": 0,
        }
        table = pa.Table.from_pylist([row, row], schema=CONSUMED)
        self._consumed.write(
            table, tokens=6, min_policy_version=version, max_policy_version=version, incarnation=incarnation
        )
        self._measure(incarnation, version, {"loss": 0.25, "tokens": 6.0})

    def _measure(self, incarnation: int, version: int, values: dict[str, float]) -> None:
        rows = [
            {"t": 1.0, "incarnation": incarnation, "policy_version": version, "name": name, "value": value}
            for name, value in values.items()
        ]
        self._metrics.write(pa.Table.from_pylist(rows, schema=METRIC), tokens=0)


def keys(columns: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    return list(zip(columns["incarnation"].tolist(), columns["policy_version"].tolist(), strict=True))


@pytest.mark.slow
@given(STARTS, st.integers(1, 4))
def test_however_often_it_is_looked_what_holds_is_what_holds_of_the_whole_stream(
    starts: list[tuple[int, int]], every: int
) -> None:
    stored = Stored()
    consumed, metrics = ConsumedRows(stored.store), MetricRows(stored.store, "train", 0)
    said: list[tuple[int, int]] = []
    begun = 0
    for incarnation, versions in spans(starts):
        stored.begin(incarnation, versions[0] - 1)
        begun += 1
        for version in versions:
            stored.step(incarnation, version)
            said.append((incarnation, version))
            if len(said) % every == 0:
                consumed.read_new()
                metrics.read_new()
    consumed.read_new()
    metrics.read_new()
    incarnations, versions_said = np.array(said, np.int64).T
    held = surviving(incarnations, versions_said)
    expected = [key for key, kept in zip(said, held.tolist(), strict=True) if kept]
    assert keys(dict(consumed.columns)) == [key for key in expected for _ in range(2)]
    for name in ("loss", "tokens"):
        assert keys(dict(metrics.columns[name])) == expected
    # A trainer's time was spent even if its steps are lost.
    assert len(metrics.columns["time/loading/seconds"]["t"]) == len(metrics.columns["total/tokens"]["t"]) == begun


def test_a_damaged_part_tells_by_its_record_what_it_rolled_back() -> None:
    stored = Stored()
    for version in range(1, 6):
        stored.step(0, version)
    files = set(stored.store.objects)
    stored.step(1, 3)
    [damaged] = [path for path in set(stored.store.objects) - files if path.startswith(f"{layout.CONSUMED}/seg/")]
    stored.store.objects[damaged] = b"?"
    stored.step(1, 4)
    consumed = ConsumedRows(stored.store)
    consumed.read_new()
    [problem] = consumed.tail.problems
    assert damaged in problem
    assert keys(dict(consumed.columns)) == [(0, 1), (0, 1), (0, 2), (0, 2), (1, 4), (1, 4)]
