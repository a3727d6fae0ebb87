"""Weights between processes of one host, through one file in shared memory that holds each version once.

    train ────────── ShmSender ──copies────► ║ slot ║ ◄──hashes─────── ShmRelay.poll ────┐
                                             ║      ║                                    ├─ sync_weights
                                             ║      ║ ◄──fingerprint── ShmRelay.publish ─┘
    generator ×G ◄── ShmReceiver ◄─verifies─ ║      ║

`slots.py` decides which process may read and write which slot. The trainer neither hashes nor waits; sync_weights
hashes each tensor while the trainer copies the next. Any of these processes may be killed and restarted at any moment.
The claim of a dead process holds its slot until that process has restarted.
"""

import dataclasses
import fcntl
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import (
    HandoverReceiver,
    HandoverSender,
    Manifest,
    Weights,
    WeightsId,
    WeightsReceiver,
    WeightsSender,
)
from millrace.weights.fingerprint import HASH_THREADS, Fingerprint, hash_tensor, names_of
from millrace.weights.shared_tensors import TensorShape, shapes_of
from millrace.weights.slots import FILLING, OFFERED, PUSHED, USUAL_SLOTS, SlotFile, create_slot_file
from storage.failpoints import failpoint

MAX_GENERATORS = 64

# How long to wait for the next tensor of a trainer that may be dead, and how often to look.
_PATIENCE_SECONDS = 0.1
_LOOK_SECONDS = 1e-4


class ShmSender(HandoverSender):
    """The trainer's end, for tensors with the names, dtypes and shapes of `like`.

    Reuses a predecessor's file at `path` if it has the same layout. If not, or if the predecessor still has it open, a
    new file takes its place, and readers find that one. A file that someone deletes is made again. Raises ValueError
    for more generators than MAX_GENERATORS, StoreFull if memory has no room for the file.
    """

    def __init__(self, path: Path, like: Mapping[str, torch.Tensor], num_generators: int) -> None:
        if num_generators > MAX_GENERATORS:
            raise ValueError(f"at most {MAX_GENERATORS} generators share one weights file, not {num_generators}")
        self._path = path
        self._file = _open(path, shapes_of(like), 1 + num_generators)

    def publish(self, weights: Weights) -> None:
        """Copies each tensor once, cast to the file's dtype, from any device.

        Raises ValueError for other names or shapes than the file's, StoreFull if memory ran out.
        """
        if not self._file.is_there() and not self._is_replaced():
            lost = self._file
            self._file = _open(self._path, lost.shapes, lost.num_readers)
            lost.close()
        file = self._file
        _check_shapes(weights, file.shapes)
        slot = file.free_slot()
        file.reserve(slot)
        if any(tensor.is_cuda for tensor in weights.tensors.values()):
            file.pin(slot)
        file.begin(slot)
        for parts, (name, target) in enumerate(file.tensors(slot).items(), start=1):
            target.copy_(weights.tensors[name].detach())
            failpoint("weights.mid_copy", file.path.name)
            file.set_parts(slot, parts)
        file.offer(slot, weights.manifest)

    def resend_requested(self) -> bool:
        # A cut-off file may not be touched: reading beyond its end kills the process.
        if not self._file.is_there():
            return not self._is_replaced()
        return self._file.resend_requested(self._file.pointed(OFFERED))

    def _is_replaced(self) -> bool:
        """Whether a sound file is there that is not this one: a successor's."""
        if (other := _sound_file(self._path)) is None:
            return False
        other.close()
        return other.inode != self._file.inode

    def close(self) -> None:
        if not self._file.handle.closed:
            # Views of the file keep it mapped, and with that locked.
            fcntl.flock(self._file.handle, fcntl.LOCK_UN)
            self._file.close()


class _SlotReader(WeightsReceiver):
    """Reader number `reader` of the file at `path`, which may not exist yet, and may be replaced by another."""

    def __init__(self, path: Path, reader: int) -> None:
        self._path = path
        self._reader = reader
        self._file: SlotFile | None = None
        self._held: tuple[SlotFile, int] | None = None

    def _claim(self, pointer: int) -> tuple[SlotFile, int] | None:
        """Claims the slot that a pointer names now, in place of the last claim; None before the first version."""
        self._held = None
        file = self._current()
        # A predecessor's file may be for fewer readers: the trainer is about to replace it.
        if file is not None and self._reader < file.num_readers:
            slot = file.claim(self._reader, pointer)
            self._held = None if slot is None else (file, slot)
        return self._held

    def _current(self) -> SlotFile | None:
        if self._file is not None and not self._file.is_there():
            self._file.close()
            self._file = None
        self._file = self._file or _sound_file(self._path)
        return self._file

    def close(self) -> None:
        """Drops the claim."""
        self._held = None
        if self._file is not None:
            # A cut-off file may not be touched.
            if self._reader < self._file.num_readers and self._file.is_there():
                self._file.give_up(self._reader)
            self._file.close()
            self._file = None


class ShmRelay(_SlotReader, HandoverReceiver, WeightsSender):
    """sync_weights' end: polls the trainer's versions and, for the transport `shm`, publishes them in place."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, reader=0)

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest weights, if newer. Computes the fingerprint instead of checking it: hashes every byte.

        If the trainer is filling a slot, follows it to the end, unless it stops half-way. Raises WeightsCorrupt only if
        a version that a predecessor pushed has changed since.
        """
        for pointer in (FILLING, OFFERED):
            claimed = self._claim(pointer)
            if claimed is None:
                return None
            file, slot = claimed
            if file.resend_requested(slot):
                return None
            if file.is_whole(slot) and not _manifest(file, slot, OFFERED).id.newer_than(newer_than):
                return None
            tensors = file.tensors(slot)
            hashes = _follow(file, slot, tensors)
            if hashes is not None:
                break
        else:
            return None
        manifest = dataclasses.replace(_manifest(file, slot, OFFERED), fingerprint=hashes)
        if not manifest.id.newer_than(newer_than):
            return None
        if (pushed := file.read_manifest(slot, PUSHED)) is not None and pushed.fingerprint is not None:
            pushed.fingerprint.match(hashes, _describe(file, pushed))
        file.request_resend(None)
        return Weights(manifest=manifest, tensors=tensors, shared=file.shared(slot))

    def verify(self, weights: Weights) -> None:
        claimed = self._claim(OFFERED)
        if claimed is not None and _manifest(*claimed, OFFERED).id == weights.id:
            weights.fingerprint.verify(weights.tensors, _describe(claimed[0], weights.manifest))

    def request_resend(self) -> None:
        assert self._held is not None, "a damaged slot has been claimed"
        file, slot = self._held
        file.request_resend(slot)

    def publish(self, weights: Weights) -> None:
        """Shows generators the slot that was polled last. Raises ValueError if it holds other weights."""
        held = self._held
        if held is None or _manifest(*held, OFFERED).id != weights.id:
            raise ValueError(f"version {weights.id.policy_version} is not what came from the handover last")
        file, slot = held
        file.push(slot, weights.manifest)


class ShmReceiver(_SlotReader):
    """The end of generator number `generator` of the file at `path`, which may not exist yet."""

    def __init__(self, path: Path, generator: int) -> None:
        super().__init__(path, reader=1 + generator)

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        claimed = self._claim(PUSHED)
        if claimed is None:
            return None
        file, slot = claimed
        manifest = _manifest(file, slot, PUSHED)
        if not manifest.id.newer_than(newer_than):
            return None
        weights = Weights(manifest=manifest, tensors=file.tensors(slot), shared=file.shared(slot))
        weights.fingerprint.verify(weights.tensors, _describe(file, manifest))
        return weights


def _open(path: Path, shapes: tuple[TensorShape, ...], num_readers: int) -> SlotFile:
    while (file := _lock(path, shapes, num_readers)) is None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        create_slot_file(path, shapes, num_readers)
    for slot in range(USUAL_SLOTS):
        file.reserve(slot)
    return file


def _sound_file(path: Path) -> SlotFile | None:
    """The file at `path`; None if there is none, or one of another kind or cut off, which the trainer replaces."""
    try:
        return SlotFile(path)
    except (FileNotFoundError, WeightsCorrupt):
        return None


def _lock(path: Path, shapes: tuple[TensorShape, ...], num_readers: int) -> SlotFile | None:
    """The file at `path`, locked for this writer; None if its layout differs or another writer holds it."""
    file = _sound_file(path)
    if file is None:
        return None
    if (file.shapes, file.num_readers) == (shapes, num_readers):
        # A predecessor that is frozen and not dead would some day write between this one's tensors.
        with suppress(BlockingIOError):
            fcntl.flock(file.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
    file.close()
    return None


def _check_shapes(weights: Weights, shapes: tuple[TensorShape, ...]) -> None:
    expected = {name: shape for name, _, shape in shapes}
    actual = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    # copy_ would broadcast a wrong shape, and an absent tensor would leave an older version's in its place.
    if actual != expected:
        names = sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))
        raise ValueError(
            f"version {weights.id.policy_version} has other tensors than the handover was made for: {names_of(names)}"
        )


def _follow(file: SlotFile, slot: int, tensors: Mapping[str, torch.Tensor]) -> Fingerprint | None:
    """Hashes a claimed slot's tensors, each as soon as it is written; None if the rest does not come."""
    hashes: dict[str, Future[str]] = {}
    # A GPU copies faster than one thread hashes.
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        for parts, (name, tensor) in enumerate(tensors.items(), start=1):
            if not _wait_for(file, slot, parts):
                return None
            hashes[name] = threads.submit(hash_tensor, tensor)
            failpoint("weights.mid_hash")
    if not _wait_for(file, slot, len(tensors) + 1):
        return None
    return Fingerprint(tensors={name: value.result() for name, value in hashes.items()})


def _wait_for(file: SlotFile, slot: int, parts: int) -> bool:
    """Waits for this many parts of a slot; False if they do not come."""
    given_up = time.monotonic() + _PATIENCE_SECONDS
    while file.parts(slot) < parts:
        # A trainer that was started again has left this slot for another.
        if file.pointed(FILLING) != slot or time.monotonic() > given_up:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _manifest(file: SlotFile, slot: int, kind: int) -> Manifest:
    manifest = file.read_manifest(slot, kind)
    if manifest is None:
        raise WeightsCorrupt(f"slot {slot} of {file.path} is marked whole but has no manifest")
    return manifest


def _describe(file: SlotFile, manifest: Manifest) -> str:
    return f"weights of version {manifest.id.policy_version} in {file.path}"
