"""Where a reader assembles a version that arrives in pieces: a shared-memory file for all tensors of one version.

    reader ──fills──► file ──SharedTensors.map──► the engine's other processes

A reader that receives in a thread has a second one while the first is in use, so that it can always receive:

    thread ─free─► buffer ─fill, verify─► arrived ─take─► lent to the caller ─next take─► free
"""

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId
from millrace.weights.shared_tensors import SharedTensors, TensorShape, span_bytes, views
from storage.errors import StoreFull


class ReceiveBuffer:
    """The file at `path`, in an existing folder. It is created once shapes are known, and again when they change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shared: SharedTensors | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def tensors_for(self, shapes: Sequence[TensorShape]) -> dict[str, torch.Tensor]:
        """Tensors of these shapes to write into, by name: zeros at first, later what was written last.

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


class ReceiveBuffers:
    """One file beside `path`, and a second one while the first is lent or waits to be taken.

    Any thread may call the methods.
    """

    def __init__(self, path: Path) -> None:
        self._buffers = [ReceiveBuffer(path.with_name(f"{path.name}-{i}")) for i in (0, 1)]
        self._lock = threading.Lock()
        self._held: WeightsId | None = None
        self._lent: ReceiveBuffer | None = None
        self._arrived: tuple[Weights, ReceiveBuffer] | None = None
        self._refused: WeightsCorrupt | None = None
        self._last_refused: WeightsId | None = None

    def lacks(self, wanted: WeightsId) -> bool:
        """Whether these are newer than what the caller has and than what waits for it here."""
        with self._lock:
            return wanted.newer_than(self._held) and (self._arrived is None or wanted.newer_than(self._arrived[0].id))

    def free(self) -> ReceiveBuffer:
        """A buffer that is not in use. If there is none, discards the version that was never taken."""
        with self._lock:
            untaken = None if self._arrived is None else self._arrived[1]
            unused = [buffer for buffer in self._buffers if buffer is not self._lent and buffer is not untaken]
            if not unused:
                self._arrived = None
                assert untaken is not None
                return untaken
            for buffer in unused[1:]:
                # Each is a whole model. The second is seldom needed, and made again when it is.
                buffer.close()
            return unused[0]

    def arrive(self, weights: Weights, buffer: ReceiveBuffer) -> None:
        """These are in this buffer, whole and verified."""
        with self._lock:
            self._arrived = weights, buffer

    def refuse(self, damaged: WeightsId, error: WeightsCorrupt) -> None:
        """This version arrived damaged. The next `take` raises it, once per version, also if it is sound meanwhile."""
        with self._lock:
            if damaged != self._last_refused:
                self._last_refused, self._refused = damaged, error

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest that arrived, if newer. Ends the loan of what was taken before. Raises what was refused, once."""
        with self._lock:
            self._held, self._lent = newer_than, None
            refused, self._refused = self._refused, None
            if refused is not None:
                raise refused
            arrived, self._arrived = self._arrived, None
            if arrived is not None and arrived[0].id.newer_than(newer_than):
                weights, self._lent = arrived
                self._held = weights.id
                return weights
            return None

    def close(self) -> None:
        """Removes the files. What was lent stays usable."""
        for buffer in self._buffers:
            buffer.close()
