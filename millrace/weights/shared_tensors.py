"""Tensors in a file that several processes of a host map, and the file in which a receiver assembles a version.

receiver ─fills─► ReceiveBuffer ─► SharedTensors ──JSON──► another process ──map──► the same bytes, without a copy
"""

import errno
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from storage.errors import StoreFull

_ALIGN = 64  # a cache line, and a multiple of every dtype's own alignment

TensorShape = tuple[str, str, tuple[int, ...]]
"""A tensor's name, dtype (`float32`, `bfloat16`, …) and shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTensors:
    """Tensors one after the other in a file, each at a multiple of 64 bytes from the first."""

    path: str
    offset: int
    """Of the first tensor's first byte."""
    shapes: tuple[TensorShape, ...]
    """In file order."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"path": self.path, "offset": self.offset, "shapes": [list(shape) for shape in self.shapes]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SharedTensors":
        """The inverse of `to_json`."""
        return cls(path=values["path"], offset=values["offset"], shapes=shapes_from_json(values["shapes"]))

    def map(self) -> dict[str, torch.Tensor]:
        """Views of the file's pages, by name; they must not be written to. Raises OSError if the file is gone."""
        with Path(self.path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        return views(memoryview(mapped)[self.offset :], self.shapes)


class ReceiveBuffer:
    """The file at `path`, in an existing folder. It is created once shapes are known, and again when they change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shared: SharedTensors | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def tensors_for(self, shapes: Sequence[TensorShape]) -> dict[str, torch.Tensor]:
        """Tensors of these shapes to write into, by name: zeros at first, later the last content.

        Raises StoreFull if memory has no room for them.
        """
        if self._shared is None or self._shared.shapes != tuple(shapes):
            # Drop the old file first: both together may not fit.
            self._tensors = {}
            self._shared = None
            memory = self._create(max(1, span_bytes(shapes)))
            self._tensors = views(memory, shapes)
            self._shared = SharedTensors(path=str(self._path), offset=0, shapes=tuple(shapes))
        return self._tensors

    @property
    def shared(self) -> SharedTensors:
        """Where the tensors of `tensors_for` are. Raises ValueError before there are any."""
        if self._shared is None:
            raise ValueError(f"{self._path}: nothing was received there")
        return self._shared

    def close(self) -> None:
        """Removes the file. Tensors that were handed out stay usable."""
        self._path.unlink(missing_ok=True)
        self._tensors = {}
        self._shared = None

    def _create(self, nbytes: int) -> memoryview:
        # Never overwrite a predecessor's file: processes that mapped it keep it as it was.
        self._path.unlink(missing_ok=True)
        with self._path.open("x+b") as file:
            try:
                # Writing to memory that cannot be allocated would end the process by a signal.
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                self._path.unlink()
                if error.errno == errno.ENOSPC:
                    raise StoreFull(f"{self._path}: no room left for {nbytes:,} bytes of weights") from error
                raise
            return memoryview(mmap.mmap(file.fileno(), nbytes))


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorShape, ...]:
    """Names, dtypes and shapes of these tensors, in their order."""
    return tuple(
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()
    )


def shapes_from_json(values: Sequence[Sequence[Any]]) -> tuple[TensorShape, ...]:
    """Shapes from JSON, which knows no tuples."""
    return tuple((name, dtype, tuple(shape)) for name, dtype, shape in values)


def span_bytes(shapes: Sequence[TensorShape]) -> int:
    """Bytes that such tensors take, from the first one's first byte to the end of the last one's padding."""
    return sum(_padded_bytes(dtype, shape) for _, dtype, shape in shapes)


def views(memory: memoryview, shapes: Sequence[TensorShape]) -> dict[str, torch.Tensor]:
    """Tensors in writable memory, arranged as in `SharedTensors`, by name, as views of it."""
    tensors: dict[str, torch.Tensor] = {}
    offset = 0
    for name, dtype, shape in shapes:
        count = math.prod(shape)
        # frombuffer refuses tensors without elements.
        flat = (
            torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=offset)
            if count
            else torch.empty(0, dtype=getattr(torch, dtype))
        )
        tensors[name] = flat.view(shape)
        offset += _padded_bytes(dtype, shape)
    return tensors


def _padded_bytes(dtype: str, shape: Sequence[int]) -> int:
    nbytes: int = math.prod(shape) * getattr(torch, dtype).itemsize
    return -(-nbytes // _ALIGN) * _ALIGN
