"""A file in shared memory with room for several versions of the same tensors. No process that uses it waits for others.

    page 0    │ magic │ sizes │ filling │ offered │ pushed │ claim of reader 0 … │ parts in slot 0 … │ again │   words
    shapes    │ JSON: name, dtype and shape of each tensor
    slot 0 …  │ offered manifest │ pushed manifest │ tensors, one after the other │   every part begins a page

Three pointers each name a slot: `filling` the one that was begun last, `offered` the newest whole one, `pushed` the one
for the generators. A reader claims a slot, checks that the pointer still names it, and only then reads. A slot that
neither a pointer nor a claim names is free: of R + 4 slots one always is. `again` names a slot that sync_weights found
damaged: the trainer offers its version once more, in another slot. Each word has one writer. The file is sparse and the
lowest free slot is taken, so it seldom costs more than three copies of the weights.
"""

import errno
import json
import mmap
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Manifest
from millrace.weights.shared_tensors import SharedTensors, TensorShape, shapes_from_json, span_bytes, views
from storage.errors import StoreFull
from storage.stores.memory import SHARED_MEMORY

FILLING, OFFERED, PUSHED = 0, 1, 2
"""The pointers. A slot has two manifests: OFFERED is written by the trainer, PUSHED by sync_weights."""
USUAL_SLOTS = 3
"""In use most of the time: one that is offered, one that generators still read, and one to write to."""

_MAGIC = b"MILLSLOT"
_NONE = -1
_PAGE = 4096
# Words of page 0; the first is the magic.
_SHAPES_BYTES_AT, _MANIFEST_BYTES_AT, _READERS_AT, _POINTERS_AT, _CLAIMS_AT = 1, 2, 3, 4, 7
# Before each manifest: its length in bytes (0: there is none) and its xxh3_64.
_GUARD = struct.Struct("<QQ")
# Bytes of a manifest's fingerprint per tensor, without its name.
_HASH_ENTRY_BYTES = 45
_MANIFEST_REST_BYTES = 64 << 10


class SlotFile:
    """The file at `path`, mapped. Raises FileNotFoundError; WeightsCorrupt if it is a file of another kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = path.open("r+b")
        try:
            self._open()
        except (ValueError, TypeError, OSError, WeightsCorrupt) as error:
            self.handle.close()
            raise WeightsCorrupt(f"{path} is not a shared-memory weights file, or was cut off: {error}") from error

    def _open(self) -> None:
        if self.handle.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin like one")
        status = os.fstat(self.handle.fileno())
        self.inode = status.st_ino
        self._map = mmap.mmap(self.handle.fileno(), 0)
        self._words = memoryview(self._map)[:_PAGE].cast("q")
        self._reserved: set[int] = set()
        self._pinned: dict[int, int] = {}
        """Address by slot."""
        shapes = bytes(self._map[_PAGE : _PAGE + self._words[_SHAPES_BYTES_AT]])
        self.shapes = shapes_from_json(json.loads(shapes))
        self.num_readers: int = self._words[_READERS_AT]
        self.num_slots = _num_slots(self.num_readers)
        self._parts_at = _CLAIMS_AT + self.num_readers
        self._again_at = self._parts_at + self.num_slots
        self._manifest_bytes: int = self._words[_MANIFEST_BYTES_AT]
        self._slot_bytes = _slot_bytes(self._manifest_bytes, self.shapes)
        self._first_slot = _PAGE + _round_up(len(shapes))
        self._size = self._first_slot + self.num_slots * self._slot_bytes
        if status.st_size != self._size:
            raise ValueError(f"it has {status.st_size:,} bytes, expected {self._size:,}")

    def is_there(self) -> bool:
        """Whether this file is still whole, and still the one at its path."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False
        # The size comes first: pages beyond the end of a truncated file may not be touched.
        same = status.st_ino == self.inode and status.st_size == self._size
        return same and self._map[: len(_MAGIC)] == _MAGIC

    def pointed(self, pointer: int) -> int:
        """The slot that a pointer names; negative if none."""
        return self._words[_POINTERS_AT + pointer]

    def begin(self, slot: int) -> None:
        """Empties a free slot and starts to fill it; readers may follow."""
        for kind in (OFFERED, PUSHED):
            start = self._manifest_at(slot, kind)
            self._map[start : start + _GUARD.size] = bytes(_GUARD.size)
        self.set_parts(slot, 0)
        self._words[_POINTERS_AT + FILLING] = slot

    def parts(self, slot: int) -> int:
        """How many parts of a slot are written: its tensors in their order, then the trainer's manifest."""
        return self._words[self._parts_at + slot]

    def set_parts(self, slot: int, parts: int) -> None:
        """Publishes how many parts of a slot are written."""
        self._words[self._parts_at + slot] = parts

    def is_whole(self, slot: int) -> bool:
        """Whether all parts are written."""
        return self.parts(slot) == len(self.shapes) + 1

    def offer(self, slot: int, manifest: Manifest) -> None:
        """Completes a slot with its last part. Raises ValueError as `write_manifest` does."""
        self.write_manifest(slot, OFFERED, manifest)
        self.set_parts(slot, len(self.shapes) + 1)
        self._words[_POINTERS_AT + OFFERED] = slot

    def push(self, slot: int, manifest: Manifest) -> None:
        """Shows a whole slot to the generators. Raises ValueError as `write_manifest` does."""
        self.write_manifest(slot, PUSHED, manifest)
        self._words[_POINTERS_AT + PUSHED] = slot

    def claim(self, reader: int, pointer: int) -> int | None:
        """Claims the slot that `pointer` names for reader number `reader`, in place of its last; None if it names none.

        Until the reader's next claim no process writes to the slot.
        """
        while True:
            slot = self.pointed(pointer)
            self._words[_CLAIMS_AT + reader] = slot
            # If the pointer moved on before the claim was visible, the slot may be written to already.
            if self.pointed(pointer) == slot:
                return None if slot == _NONE else slot

    def give_up(self, reader: int) -> None:
        """Drops a reader's claim."""
        self._words[_CLAIMS_AT + reader] = _NONE

    def request_resend(self, slot: int | None) -> None:
        """Asks the trainer for the content of a slot once more, as it is damaged; None: for nothing any more."""
        self._words[self._again_at] = _NONE if slot is None else slot

    def resend_requested(self, slot: int) -> bool:
        """Whether the content of a slot is asked for once more."""
        return slot != _NONE and self._words[self._again_at] == slot

    def free_slot(self) -> int:
        """The lowest free slot, for the only process that fills slots."""
        while True:
            pushed = self.pointed(PUSHED)
            claims = self._words[_CLAIMS_AT : _CLAIMS_AT + self.num_readers].tolist()
            # If a slot was pushed before the first look and replaced since, its readers' claims show in the second. If
            # one was pushed after the first look and released before the second, it shows in neither, so look again.
            if self.pointed(PUSHED) == pushed:
                taken = {self.pointed(FILLING), self.pointed(OFFERED), pushed, *claims}
                return next(slot for slot in range(self.num_slots) if slot not in taken)

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """A slot's tensors by name, as views of it."""
        return views(memoryview(self._map)[self._tensors_at(slot) :], self.shapes)

    def shared(self, slot: int) -> SharedTensors:
        """Where a slot's tensors are."""
        return SharedTensors(path=str(self.path), offset=self._tensors_at(slot), shapes=self.shapes)

    def write_manifest(self, slot: int, kind: int, manifest: Manifest) -> None:
        """Writes a slot's manifest of this kind. Raises ValueError if it is longer than the file has room for."""
        text = json.dumps(manifest.to_json()).encode()
        if len(text) > self._manifest_bytes - _GUARD.size:
            raise ValueError(
                f"the manifest of version {manifest.id.policy_version} has {len(text)} bytes, "
                f"{self.path} has room for {self._manifest_bytes - _GUARD.size}"
            )
        start = self._manifest_at(slot, kind)
        begin = start + _GUARD.size
        self._map[begin : begin + len(text)] = text
        # Written last, so that a manifest that a killed process left half-written counts as none.
        self._map[start:begin] = _GUARD.pack(len(text), xxhash.xxh3_64_intdigest(text))

    def read_manifest(self, slot: int, kind: int) -> Manifest | None:
        """A slot's manifest of this kind; None if there is none. Raises WeightsCorrupt."""
        start = self._manifest_at(slot, kind)
        length, expected = _GUARD.unpack(self._map[start : start + _GUARD.size])
        if length == 0:
            return None
        begin = start + _GUARD.size
        text = bytes(self._map[begin : begin + min(length, self._manifest_bytes)])
        if xxhash.xxh3_64_intdigest(text) != expected:
            raise WeightsCorrupt(f"the manifest in slot {slot} of {self.path} is damaged")
        return Manifest.from_json(json.loads(text))

    def reserve(self, slot: int) -> None:
        """Allocates a slot's memory once, so that filling it neither waits for pages nor runs out of them.

        Raises StoreFull if there is not enough.
        """
        if slot in self._reserved:
            return
        start = self._slot_at(slot)
        try:
            os.posix_fallocate(self.handle.fileno(), start, self._slot_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            free = shutil.disk_usage(self.path.parent).free
            raise StoreFull(
                f"{self.path} needs {self._slot_bytes:,} bytes of shared memory for each copy of the weights, "
                f"usually {USUAL_SLOTS} of them; {free:,} are left for the next one"
            ) from error
        # Reading each page maps it.
        np.frombuffer(self._map, dtype=np.uint8, count=self._slot_bytes, offset=start)[::_PAGE].max()
        self._reserved.add(slot)

    def pin(self, slot: int) -> None:
        """Pins a reserved slot's memory for CUDA until `close`: an H100 then copies into it four times as fast.

        Raises torch.cuda.CudaError.
        """
        # The kernel pins no pages of a file on a disk.
        if slot in self._pinned or SHARED_MEMORY not in self.path.absolute().parents:
            return
        memory = torch.frombuffer(self._map, dtype=torch.uint8, count=self._slot_bytes, offset=self._slot_at(slot))
        # Tensor.pin_memory would make a copy.
        torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), self._slot_bytes, 0))
        self._pinned[slot] = memory.data_ptr()

    def close(self) -> None:
        """Closes the file; its pages stay mapped until the last view of them is gone."""
        for address in self._pinned.values():
            torch.cuda.check_error(_cudart().cudaHostUnregister(address))
        self._pinned.clear()
        self.handle.close()

    def _slot_at(self, slot: int) -> int:
        return self._first_slot + slot * self._slot_bytes

    def _manifest_at(self, slot: int, kind: int) -> int:
        return self._slot_at(slot) + (kind - OFFERED) * self._manifest_bytes

    def _tensors_at(self, slot: int) -> int:
        return self._manifest_at(slot, PUSHED) + self._manifest_bytes


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def create_slot_file(path: Path, shapes: Sequence[TensorShape], num_readers: int) -> None:
    """Creates an empty file. It is renamed into place, so that no process sees half of it."""
    described = json.dumps([list(shape) for shape in shapes]).encode()
    entries = sum(len(json.dumps(name)) + _HASH_ENTRY_BYTES for name, _, _ in shapes)
    manifest_bytes = _round_up(_MANIFEST_REST_BYTES + entries)
    words = np.full(_PAGE // 8 - 1, _NONE, dtype=np.int64)
    words[: _POINTERS_AT - 1] = [len(described), manifest_bytes, num_readers]
    slots_bytes = _num_slots(num_readers) * _slot_bytes(manifest_bytes, shapes)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(_MAGIC + words.tobytes() + described)
        file.truncate(_PAGE + _round_up(len(described)) + slots_bytes)
    temporary.replace(path)


def _num_slots(num_readers: int) -> int:
    return num_readers + 4


def _slot_bytes(manifest_bytes: int, shapes: Sequence[TensorShape]) -> int:
    return 2 * manifest_bytes + _round_up(span_bytes(shapes))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
