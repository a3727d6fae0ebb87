"""Weights between processes of one host, through a file in shared memory: one writer, R readers, nobody waits.

    header  │ magic, slot bytes, slots, readers │ newest slot │ claim of reader 0 … R-1 │ per slot: id, checksum │ names
    slots   │ slot 0 │ slot 1 │ … │ slot R+1 │        each holds all tensors of one version, back to back

The writer fills a slot that is neither the newest nor claimed, then points `newest` at it. A reader claims the newest
slot, looks again whether it still is the newest, and only then reads. With R + 2 slots there is always a free one. The
checksum catches what a crash in between could leave behind; a reader that died is forgotten when it opens again.
"""

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReader, WeightsWriter
from storage.failpoints import failpoint

_MAGIC = 0x4D494C4C52414345
_NONE = -1
_FIXED = 5  # int64 words before the claims: magic, names' bytes, slot bytes, readers, newest
_SLOT_WORDS = 4  # int64 words a slot: incarnation, policy_version, t_offered (float64 bits), checksum
_ALIGN = 4096
MAX_READERS = 64


class _SharedFile:
    """The mapped file: its header as int64 words, and where each slot and tensor lies."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        self.words = np.frombuffer(self.map, dtype=np.int64, count=_ALIGN // 8)
        if self.words[0] != _MAGIC:
            raise WeightsCorrupt(f"{path} is not a shared-memory weights file")
        names = bytes(self.map[_ALIGN : _ALIGN + int(self.words[1])])
        self.tensors: list[tuple[str, str, list[int]]] = json.loads(names)
        self.slot_bytes, self.readers = int(self.words[2]), int(self.words[3])
        self.first_slot = _round_up(_ALIGN + len(names))
        self.num_slots = self.readers + 2

    @property
    def newest(self) -> int:
        return int(self.words[4])

    @newest.setter
    def newest(self, slot: int) -> None:
        self.words[4] = slot

    @property
    def claims(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self.words[_FIXED : _FIXED + self.readers]

    def slot_header(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        start = _FIXED + self.readers + slot * _SLOT_WORDS
        return self.words[start : start + _SLOT_WORDS]

    def slot(self, slot: int) -> memoryview:
        start = self.first_slot + slot * _round_up(self.slot_bytes)
        return memoryview(self.map)[start : start + self.slot_bytes]

    def close(self) -> None:
        # The map itself goes when the last view of it does: taken tensors may outlive the reader.
        del self.words


class ShmWriter(WeightsWriter):
    """Creates the file at `path` for tensors shaped like `like`, or goes on with the one a predecessor left there."""

    def __init__(self, path: Path, like: Mapping[str, torch.Tensor], num_readers: int) -> None:
        described = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in like.items()
        ]
        names = json.dumps(described).encode()
        slot_bytes = sum(tensor.nbytes for tensor in like.values())
        self._path = path
        if num_readers > MAX_READERS:
            raise ValueError(f"at most {MAX_READERS} readers share one weights file, not {num_readers}")
        if not _fits(path, names, slot_bytes, num_readers):
            _create(path, names, slot_bytes, num_readers)
        self._file = _SharedFile(path)

    def offer(self, weights: Weights) -> None:
        file = self._file
        taken = {file.newest, *file.claims.tolist()}
        slot = next(s for s in range(file.num_slots) if s not in taken)
        view = file.slot(slot)
        offset = 0
        for name, dtype, shape in file.tensors:
            tensor = weights.tensors[name]
            target = torch.frombuffer(view, dtype=getattr(torch, dtype), count=tensor.numel(), offset=offset)
            target.view(shape).copy_(tensor)
            offset += tensor.nbytes
            failpoint("weights.mid_copy", self._path.name)
        file.slot_header(slot)[:] = _encode(weights.id, _checksum(view))
        file.newest = slot

    def close(self) -> None:
        self._file.close()


class ShmReader(WeightsReader):
    """Reader number `reader` of the file at `path`, which may not exist yet."""

    def __init__(self, path: Path, reader: int) -> None:
        self._path = path
        self._reader = reader
        self._file: _SharedFile | None = None

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        if self._file is None:
            if not self._path.exists():
                return None
            self._file = _SharedFile(self._path)
            self._file.claims[self._reader] = _NONE
        file = self._file
        slot = self._claim_newest(file)
        if slot == _NONE:
            return None
        header = file.slot_header(slot).copy()
        weights_id, checksum = _decode(header)
        if not weights_id.newer_than(newer_than):
            return None
        view = file.slot(slot)
        found = _checksum(view)
        if found != checksum:
            raise WeightsCorrupt(
                f"weights of version {weights_id.policy_version} in {self._path} have checksum {found:08x}, "
                f"expected {checksum:08x}"
            )
        return Weights(id=weights_id, tensors=_views(view, file.tensors))

    def _claim_newest(self, file: _SharedFile) -> int:
        while True:
            slot = file.newest
            file.claims[self._reader] = slot
            if file.newest == slot:
                return slot

    def close(self) -> None:
        if self._file is not None:
            self._file.claims[self._reader] = _NONE
            self._file.close()


def _views(view: memoryview, described: list[tuple[str, str, list[int]]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    offset = 0
    for name, dtype, shape in described:
        count = int(np.prod(shape, dtype=np.int64))
        flat = torch.frombuffer(view, dtype=getattr(torch, dtype), count=count, offset=offset)
        tensors[name] = flat.view(shape)
        offset += flat.nbytes
    return tensors


def _checksum(view: memoryview) -> int:
    # The C extension refuses memoryviews; an Arrow buffer over one is read without a copy.
    value: int = google_crc32c.value(pa.py_buffer(view))
    return value


def _encode(weights_id: WeightsId, checksum: int) -> list[int]:
    bits = int(np.float64(weights_id.t_offered).view(np.int64))
    return [weights_id.incarnation, weights_id.policy_version, bits, checksum]


def _decode(words: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[WeightsId, int]:
    incarnation, policy_version, bits, checksum = (int(word) for word in words)
    t_offered = float(np.int64(bits).view(np.float64))
    return WeightsId(incarnation=incarnation, policy_version=policy_version, t_offered=t_offered), checksum


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _fits(path: Path, names: bytes, slot_bytes: int, num_readers: int) -> bool:
    """Whether a predecessor left a file of just this make."""
    if not path.exists():
        return False
    file = _SharedFile(path)
    same = bytes(file.map[_ALIGN : _ALIGN + int(file.words[1])]) == names
    return same and (file.slot_bytes, file.readers) == (slot_bytes, num_readers)


def _create(path: Path, names: bytes, slot_bytes: int, num_readers: int) -> None:
    """Writes the empty file beside its place and moves it there whole, so that a reader never sees half of it."""
    words = np.zeros(_ALIGN // 8, dtype=np.int64)
    words[:_FIXED] = [_MAGIC, len(names), slot_bytes, num_readers, _NONE]
    words[_FIXED : _FIXED + num_readers] = _NONE
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(words.tobytes() + names)
        file.truncate(_round_up(_ALIGN + len(names)) + (num_readers + 2) * _round_up(slot_bytes))
    temporary.replace(path)
