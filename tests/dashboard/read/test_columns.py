"""Tables that grow: what was seen before stays as it was, whatever comes or goes later."""

import numpy as np
import pyarrow as pa
import pytest

from dashboard.read.columns import Codes, GrowingColumns


def columns(first: int, rows: int) -> dict[str, np.ndarray]:
    return {"a": np.arange(first, first + rows), "b": np.arange(first, first + rows) / 2}


def test_rows_appended_in_any_portions_are_all_there_in_order() -> None:
    growing = GrowingColumns({"a": np.int32, "b": np.float64})
    assert len(growing) == len(growing.view()["a"]) == 0
    first = 0
    for rows in (1, 0, 7, 1000, 3, 64):
        growing.append(columns(first, rows))
        first += rows
    view = growing.view()
    assert view["a"].dtype == np.int32
    assert view["a"].tolist() == list(range(1075))
    assert view["b"].tolist() == [row / 2 for row in range(1075)]
    assert len(growing) == 1075


def test_a_view_stays_as_it_was_while_rows_come_and_go() -> None:
    growing = GrowingColumns({"a": np.int64, "b": np.float64})
    growing.append(columns(0, 10))
    before = growing.view()
    growing.append(columns(10, 5))
    growing.keep(growing.view()["a"] % 2 == 0)
    growing.append(columns(100, 10))
    assert before["a"].tolist() == list(range(10))
    assert growing.view()["a"].tolist() == [*range(0, 15, 2), *range(100, 110)]
    assert growing.view()["b"].tolist() == [value / 2 for value in [*range(0, 15, 2), *range(100, 110)]]


def test_a_view_can_not_be_written_to() -> None:
    growing = GrowingColumns({"a": np.int64, "b": np.float64})
    growing.append(columns(0, 3))
    with pytest.raises(ValueError, match="read-only"):
        growing.view()["a"][0] = 7
    growing.append(columns(3, 1))
    assert len(growing) == 4


def test_strings_keep_their_code_from_one_column_to_the_next() -> None:
    codes = Codes("trained")
    assert codes.values == ("trained",)
    assert codes.encode(pa.chunked_array([["stale"], ["trained", "stale"]])).tolist() == [1, 0, 1]
    assert codes.encode(pa.chunked_array([["error", "stale"]])).tolist() == [2, 1]
    assert codes.values == ("trained", "stale", "error")
    assert codes.encode(pa.chunked_array([[]], pa.string())).tolist() == []
