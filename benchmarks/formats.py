"""The same rows in the forms that are at hand elsewhere: written durably, and read back into numpy arrays.

rows: a dict a trajectory, per-token columns as numpy arrays
  │ write: durable on return                                    read ▲  columns: arrays a row, or one for all rows
  ├─► stream     columns by ListArray.from_arrays, StreamWriter.write ─┤  verified
  ├─► jsonl      json.dumps a row, fsync                              ─┤
  ├─► msgpack    packb a row, its arrays as raw bytes, fsync          ─┤  none of these has a checksum of its content
  └─► torch      torch.save of a list of rows, their arrays as tensors, fsync ┘
"""

import functools
import json
import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from benchmarks.parts import about, open_writer
from benchmarks.rows import trajectories
from benchmarks.timing import in_turn
from millrace.trajectories import list_slices
from storage.local import LocalStore
from storage.schema import TRAJECTORY
from storage.stream import StreamReader

Row = dict[str, Any]
Columns = dict[str, Any]
"""By name: a list of arrays (a row each) for a column of lists, one array for numbers, a list for strings."""


class Format(ABC):
    """One way to keep rows in files below a folder of its own, which it makes."""

    name: str

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder

    @abstractmethod
    def write(self, rows: list[Row]) -> None:
        """Write all rows; they are durable on return. Once for a folder."""

    @abstractmethod
    def read(self) -> Columns:
        """What `write` wrote."""

    def bytes(self) -> int:
        """Length of all that `write` wrote."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


class Stream(Format):
    """A part of a trajectory stream."""

    name = "stream"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._store = LocalStore(folder)
        # A stream is opened once, and written to many times.
        self._writer = open_writer(self._store, "stream")

    def write(self, rows: list[Row]) -> None:
        arrays = [_to_arrow([row[field.name] for row in rows], field.type) for field in TRAJECTORY]
        table = pa.Table.from_arrays(arrays, schema=TRAJECTORY)
        self._writer.write(table, **about(table))

    def read(self) -> Columns:
        part = StreamReader(self._store, "stream", TRAJECTORY).next()
        if part is None:
            raise FileNotFoundError(f"{self.folder}: no part has been written")
        return {field.name: _from_arrow(part.table.column(field.name), field.type) for field in TRAJECTORY}


class JsonLines(Format):
    """A JSON object a line."""

    name = "jsonl"

    def write(self, rows: list[Row]) -> None:
        with (self.folder / "rows.jsonl").open("xb") as file:
            for row in rows:
                file.write(json.dumps(row, default=np.ndarray.tolist).encode() + b"\n")
            _to_disk(file)

    def read(self) -> Columns:
        with (self.folder / "rows.jsonl").open("rb") as file:
            return _to_columns(map(json.loads, file), np.array)


class MessagePack(Format):
    """A map a row, its arrays as raw bytes: the fastest way msgpack has for them."""

    name = "msgpack"

    def write(self, rows: list[Row]) -> None:
        with (self.folder / "rows.msgpack").open("xb") as file:
            for row in rows:
                file.write(msgpack.packb(row, default=np.ndarray.tobytes))
            _to_disk(file)

    def read(self) -> Columns:
        with (self.folder / "rows.msgpack").open("rb") as file:
            return _to_columns(msgpack.Unpacker(file), np.frombuffer)


class TorchSave(Format):
    """A list of dicts of tensors."""

    name = "torch.save"

    def write(self, rows: list[Row]) -> None:
        tensors = [
            {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
            for row in rows
        ]
        with (self.folder / "rows.pt").open("xb") as file:
            torch.save(tensors, file)
            _to_disk(file)

    def read(self) -> Columns:
        rows = torch.load(self.folder / "rows.pt", weights_only=True)
        return _to_columns(rows, lambda tensor, dtype: tensor.numpy().astype(dtype, copy=False))


FORMATS: tuple[type[Format], ...] = (Stream, JsonLines, MessagePack, TorchSave)


def measure_formats(folder: Path, num_rows: int, repeats: int) -> dict[str, Any]:
    """Writes and reads the same `num_rows` rows in each format, `repeats` times in turn (and once before, not counted).

    Returns by format the median seconds of `write` and `read` and the `bytes` written; `payload` is the bytes of the
    rows' values.
    """
    table = trajectories(num_rows)
    rows = as_rows(table)
    rounds = [_round(folder / str(turn), rows, turn) for turn in range(repeats + 1)][1:]
    by_format = {
        form.name: {key: statistics.median(one[form.name][key] for one in rounds) for key in ("write", "read", "bytes")}
        for form in FORMATS
    }
    return {"rows": num_rows, "payload": table.nbytes, "formats": by_format}


def as_rows(table: pa.Table) -> list[Row]:
    """The rows as an engine has them: numbers, strings, and arrays of their own."""
    columns: dict[str, Iterable[Any]] = {
        field.name: [values.copy() for values in list_slices(table.column(field.name))]
        if pa.types.is_list(field.type)
        else table.column(field.name).to_pylist()
        for field in table.schema
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _round(folder: Path, rows: list[Row], turn: int) -> dict[str, dict[str, float]]:
    formats = {form.name: form(folder / form.name) for form in FORMATS}
    written = in_turn({name: functools.partial(_writing, form, rows) for name, form in formats.items()}, turn)
    read = in_turn({name: functools.partial(_reading, form) for name, form in formats.items()}, turn)
    return {name: {"write": written[name], "read": read[name], "bytes": form.bytes()} for name, form in formats.items()}


def _writing(form: Format, rows: list[Row]) -> Callable[[], None]:
    return functools.partial(form.write, rows)


def _reading(form: Format) -> Callable[[], Columns]:
    return form.read


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _to_columns(rows: Iterable[Row], to_array: Callable[..., npt.NDArray[Any]]) -> Columns:
    dtypes = {
        field.name: field.type.value_type.to_pandas_dtype() for field in TRAJECTORY if pa.types.is_list(field.type)
    }
    columns: Columns = {field.name: [] for field in TRAJECTORY}
    for row in rows:
        for name, values in columns.items():
            values.append(to_array(row[name], dtype=dtypes[name]) if name in dtypes else row[name])
    for field in TRAJECTORY:
        if field.name not in dtypes and field.type != pa.string():
            columns[field.name] = np.array(columns[field.name], field.type.to_pandas_dtype())
    return columns


def _to_arrow(values: list[Any], dtype: pa.DataType) -> pa.Array:
    if not pa.types.is_list(dtype):
        return pa.array(values, dtype)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(values), dtype.value_type))


def _from_arrow(column: pa.ChunkedArray, dtype: pa.DataType) -> Any:
    if pa.types.is_list(dtype):
        return list_slices(column)
    return column.to_pylist() if dtype == pa.string() else column.to_numpy()
