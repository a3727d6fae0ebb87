"""Where a reader puts a version that came in pieces: a shared-memory file of its own for all tensors of one version.

reader ──fills──► landing file ──SharedTensors.map──► an engine's other processes
"""

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from millrace.weights.shared import SharedTensors, TensorShape, span_bytes, views
from storage.errors import StoreFull


class Landing:
    """The file at `path`, in a folder that exists. It is made when shapes are known, anew whenever they change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shared: SharedTensors | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def tensors_for(self, shapes: Sequence[TensorShape]) -> dict[str, torch.Tensor]:
        """Tensors of these shapes to write into, by name: zeros at first, later what was written last.

        Raises StoreFull where the memory has no room for them.
        """
        if self._shared is None or self._shared.shapes != tuple(shapes):
            # Before the new file: both together may not fit.
            self._tensors = {}
            self._shared = None
            memory = self._create(max(1, span_bytes(shapes)))
            self._tensors = views(memory, shapes)
            self._shared = SharedTensors(path=str(self._path), offset=0, shapes=tuple(shapes))
        return self._tensors

    @property
    def shared(self) -> SharedTensors:
        """Where the tensors of `tensors_for` lie. Raises ValueError before there are any."""
        if self._shared is None:
            raise ValueError(f"{self._path}: nothing has landed there")
        return self._shared

    def close(self) -> None:
        """Removes the file; tensors that were handed out stay usable."""
        self._path.unlink(missing_ok=True)
        self._tensors = {}
        self._shared = None

    def _create(self, nbytes: int) -> memoryview:
        # Never over a predecessor's file: who has mapped that one keeps it as it was.
        self._path.unlink(missing_ok=True)
        with self._path.open("x+b") as file:
            try:
                # Memory that is not there when it is written to would end the process by a signal.
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                self._path.unlink()
                if error.errno == errno.ENOSPC:
                    raise StoreFull(f"{self._path}: no room left for {nbytes:,} bytes of weights") from error
                raise
            return memoryview(mmap.mmap(file.fileno(), nbytes))
