"""Tables that grow while others read them, without copying rows for each read.

append ─► [ rows │ new rows │ room   ]      earlier views still show the same rows
keep   ─► [ chosen rows ]                   in new arrays, so that views are never overwritten
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dashboard.read.model import Columns


class GrowingColumns:
    """Numpy columns of equal length, with the given dtypes by name. Not thread-safe, but its views are."""

    def __init__(self, dtypes: Mapping[str, npt.DTypeLike]) -> None:
        self._rows = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in dtypes.items()}

    def __len__(self) -> int:
        return self._rows

    def append(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Adds rows: one array per column, all of equal length."""
        rows = self._rows + len(next(iter(columns.values())))
        for name, array in self._arrays.items():
            if rows > len(array):
                # Doubling the size copies each row about once on average.
                self._arrays[name] = np.empty(max(rows, 2 * len(array)), array.dtype)
                self._arrays[name][: self._rows] = array[: self._rows]
            self._arrays[name][self._rows : rows] = columns[name]
        self._rows = rows

    def keep(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Drops all rows except the `chosen`, one bool per row."""
        self._arrays = {name: array[: self._rows][chosen] for name, array in self._arrays.items()}
        self._rows = int(np.count_nonzero(chosen))

    def view(self) -> Columns:
        """Returns the current rows, read-only; rows appended later do not appear in it."""
        views = {name: array[: self._rows] for name, array in self._arrays.items()}
        for view in views.values():
            view.flags.writeable = False
        return views


class Codes:
    """Strings as codes of type `dtype`: the strings `first`, then others in order of occurrence."""

    def __init__(self, *first: str, dtype: npt.DTypeLike = np.int8) -> None:
        self.dtype = dtype
        self._codes = {value: code for code, value in enumerate(first)}

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(self._codes)

    def encode(self, column: pa.ChunkedArray) -> npt.NDArray[Any]:
        """Returns the code of each string. Raises OverflowError for more distinct strings than `dtype` can count."""
        values, indices = split(column)
        codes = [self._codes.setdefault(value, len(self._codes)) for value in values]
        return np.array(codes, self.dtype)[indices]


def split(column: pa.ChunkedArray) -> tuple[Sequence[str], npt.NDArray[np.int32]]:
    """Returns the distinct strings of a column, and each row's index into them."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
