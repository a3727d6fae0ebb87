"""Tables that grow: what was seen before stays as it was, whatever comes or goes later."""

import numpy as np
import pyarrow as pa

from dashboard.read.columns import Codes, GrowingColumns


def columns(first: int, rows: int) -> dict[str, np.ndarray]:
    return {"a": np.arange(first, first + rows), "b": np.arange(first, first + rows) / 2}


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


def test_strings_keep_their_code_from_one_column_to_the_next() -> None:
    codes = Codes("trained")
    assert codes.values == ("trained",)
    assert codes.encode(pa.chunked_array([["stale"], ["trained", "stale"]])).tolist() == [1, 0, 1]
    assert codes.encode(pa.chunked_array([["error", "stale"]])).tolist() == [2, 1]
    assert codes.values == ("trained", "stale", "error")
    assert codes.encode(pa.chunked_array([[]], pa.string())).tolist() == []
