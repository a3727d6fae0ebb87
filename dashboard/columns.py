"""Tables that grow at their end while others read them: a row is copied once, however often is looked.

append ─► [ rows │ new rows │ room   ]      a view taken before sees its own rows, and goes on doing so
keep   ─► [ chosen rows ]                   in arrays of its own: what views show is never overwritten
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dashboard.data import Columns


class GrowingColumns:
    """Numpy columns of one length, of the given dtypes by name. Not thread-safe; its views are."""

    def __init__(self, dtypes: Mapping[str, npt.DTypeLike]) -> None:
        self._rows = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in dtypes.items()}

    def __len__(self) -> int:
        return self._rows

    def append(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Adds rows: arrays of one length, of every column."""
        rows = self._rows + len(next(iter(columns.values())))
        for name, array in self._arrays.items():
            if rows > len(array):
                # Twice as much each time: a row is copied about once on average.
                self._arrays[name] = np.empty(max(rows, 2 * len(array)), array.dtype)
                self._arrays[name][: self._rows] = array[: self._rows]
            self._arrays[name][self._rows : rows] = columns[name]
        self._rows = rows

    def keep(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Forgets all rows but those `chosen`, one bool a row."""
        self._arrays = {name: array[: self._rows][chosen] for name, array in self._arrays.items()}
        self._rows = int(np.count_nonzero(chosen))

    def view(self) -> Columns:
        """The rows so far, read-only; what is appended later does not show in it."""
        views = {name: array[: self._rows] for name, array in self._arrays.items()}
        for view in views.values():
            view.flags.writeable = False
        return views


class Codes:
    """Strings as int8 numbers, in the order in which they were first met; `known` come first."""

    def __init__(self, *known: str) -> None:
        self._codes = {value: code for code, value in enumerate(known)}

    @property
    def values(self) -> tuple[str, ...]:
        """What the codes stand for."""
        return tuple(self._codes)

    def encode(self, column: pa.ChunkedArray) -> npt.NDArray[np.int8]:
        """A code for each string. Raises OverflowError for the 129th different one."""
        values, places = split(column)
        codes = [self._codes.setdefault(value, len(self._codes)) for value in values]
        return np.array(codes, np.int8)[places]


def split(column: pa.ChunkedArray) -> tuple[Sequence[str], npt.NDArray[np.int32]]:
    """The different strings of a column, and of each row which of them it holds."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
