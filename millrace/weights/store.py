"""Weights through the run's store: between any hosts, and for late generators.

    StoreSender ─┬─► weights/data/<version>-<uuid>/weights.safetensors   whole ─────────┬─► weights/log: a record,
                 ├─► weights/data/<version>-<uuid>/weights.delta         changes ───────┤   the commit
                 └─► weights/data/<version>-<uuid>/adapter_model.safetensors            │
                                                   adapter_config.json   an adapter ────┘

    log   anchor 0 ◄── delta 1 ◄── delta 2 … delta 15   anchor 16 ◄── delta 17 ◄── delta 18
                                                            └────────── chain ─────────┘
    StoreReceiver holds a version of the chain? ── yes ─► the deltas behind it, in order ──┬─► every tensor's hash
                            └── no ─► the anchor ─► all deltas ────────────────────────────┘   ─► Weights

A delta is against the version stored before it. A writer begins with an anchor, because it holds no earlier version,
and writes another whenever a delta would save little. Each version of a LoRA run is a whole adapter, in a folder that
PEFT and vLLM load.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from millrace.errors import WeightsCorrupt
from millrace.weights import delta
from millrace.weights.adapter import TENSORS_FILE
from millrace.weights.base import Manifest, Weights, WeightsId, WeightsReceiver, WeightsSender
from millrace.weights.fingerprint import Fingerprint
from millrace.weights.shared_tensors import ReceiveBuffer, shapes_of
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.errors import StreamCorrupt
from storage.stores.base import Store
from storage.streams.files import FileRef, get_file
from storage.streams.log import LogReader, backwards
from storage.streams.record import Record

ANCHOR_EVERY = 16
"""One version in this many is an anchor: a late reader reads an anchor and at most 15 deltas."""
_WORTH_IT = 4
"""A delta of more than 1 / this of the tensors' bytes is not worth applying."""
_TOO_MANY = 0.5
"""If this share of the elements changed, as it does in float32, a delta is not even tried: it takes seconds."""
_FILES = {"anchor": "weights.safetensors", "delta": "weights.delta", "adapter": TENSORS_FILE}
"""Kind of a record → its file of tensors."""


class StoreSender(WeightsSender):
    """Commits version after version; opening it ends an older sync_weights stage."""

    def __init__(self, store: Store) -> None:
        self._log = CheckpointWriter(store, layout.WEIGHTS, writer="sync_weights")
        self._stored: WeightsId | None = None
        self._digest = ""
        self._tensors: dict[str, torch.Tensor] = {}
        """Copy of the version stored last."""
        self._deltas = 0
        """Stored since the last anchor."""

    def publish(self, weights: Weights) -> None:
        """Commits the version. Raises ValueError without a fingerprint, and the errors of `CheckpointWriter.commit`.

        After an OSError it is unknown whether it was committed, and the sender must be opened again.
        """
        digest, adapter = weights.fingerprint.digest, weights.manifest.adapter
        encoded = self._encode(weights, digest)
        if adapter is not None:
            kind, files = "adapter", adapter.files(weights.tensors)
        elif encoded is not None:
            kind, files = "delta", {_FILES["delta"]: encoded}
        else:
            whole = {name: tensor.contiguous() for name, tensor in weights.tensors.items()}
            kind, files = "anchor", {_FILES["anchor"]: safetensors.torch.save(whole)}
        state = {
            "kind": kind,
            "base": None if encoded is None else self._digest,
            "manifest": weights.manifest.to_json(),
        }
        self._log.commit(weights.id.policy_version, files, state)
        self._deltas = 0 if encoded is None else self._deltas + 1
        self._remember(weights, digest)

    def close(self) -> None:
        """Drops the copy; nothing else is held between two commits."""
        self._tensors = {}
        self._stored = None

    def _encode(self, weights: Weights, digest: str) -> bytes | None:
        """The delta from the version stored last; None where an anchor is better."""
        if weights.manifest.adapter is not None:
            # Small, and each version has to be a folder that others can load.
            return None
        if self._stored is None or self._stored.incarnation != weights.id.incarnation:
            return None
        if self._deltas + 1 == ANCHOR_EVERY or not self._like(weights):
            return None
        if delta.share_changed(self._tensors, weights.tensors) > _TOO_MANY:
            return None
        encoded = delta.encode(self._tensors, weights.tensors, base=self._digest, digest=digest)
        return encoded if len(encoded) * _WORTH_IT <= weights.nbytes else None

    def _remember(self, weights: Weights, digest: str) -> None:
        if self._like(weights):
            for name, tensor in weights.tensors.items():
                self._tensors[name].copy_(tensor)
        else:
            self._tensors = {
                name: tensor.detach().clone(memory_format=torch.contiguous_format)
                for name, tensor in weights.tensors.items()
            }
        self._stored, self._digest = weights.id, digest

    def _like(self, weights: Weights) -> bool:
        return sorted(shapes_of(self._tensors)) == sorted(shapes_of(weights.tensors))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """One version, from its record."""

    manifest: Manifest
    fingerprint: Fingerprint
    is_anchor: bool
    """Whether it needs no earlier version; an adapter needs none."""
    file: FileRef
    seq: int
    """Number of the record."""

    def __str__(self) -> str:
        return f"weights of version {self.manifest.id.policy_version} in {self.file.path}"


class StoreReceiver(WeightsReceiver):
    """Follows the log of versions, and assembles them in a file at `path`, see `ReceiveBuffer`."""

    def __init__(self, store: Store, path: Path) -> None:
        self._store = store
        self._log: LogReader | None = None
        self._chain: list[_Stored] = []
        """The last anchor, and all deltas behind it."""
        self._buffer = ReceiveBuffer(path)
        self._tensors: dict[str, torch.Tensor] = {}
        self._holds: str | None = None
        """Digest of the version in the buffer; None while it is incomplete."""

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """Returns the newest weights if they are newer; otherwise costs one request to the store.

        Raises WeightsCorrupt, naming the file, if a file that they need is damaged or removed, or the result does not
        match its fingerprint. Raises the store's errors. A late version raises nothing.
        """
        self._follow()
        while self._chain and self._chain[-1].manifest.id.newer_than(newer_than):
            newest = self._chain[-1]
            try:
                self._assemble(newest)
            except WeightsCorrupt:
                # A newer version may have arrived, and a gc may have removed files that it does not need.
                self._follow()
                if self._chain[-1] is newest:
                    raise
            else:
                return Weights(manifest=newest.manifest, tensors=self._tensors, shared=self._buffer.shared)
        return None

    def close(self) -> None:
        """Removes the file."""
        self._buffer.close()
        self._holds = None

    def _follow(self) -> None:
        """Reads the new records; the first time, back to the last anchor."""
        if self._log is None:
            log = LogReader.at_head(self._store, layout.WEIGHTS)
            chain: list[_Stored] = []
            for earlier in backwards(self._store, layout.WEIGHTS, log.cursor):
                if (stored := _stored(earlier)) is not None:
                    chain.insert(0, stored)
                    if stored.is_anchor:
                        break
            self._chain, self._log = chain, log
        while (record := self._log.next()) is not None:
            if (stored := _stored(record)) is not None:
                self._chain = [stored] if stored.is_anchor else [*self._chain, stored]

    def _assemble(self, newest: _Stored) -> None:
        """Makes the buffer hold the last version of the chain."""
        digests = [stored.fingerprint.digest for stored in self._chain]
        if self._holds in digests:
            # Whatever is wrong here, the anchor does not depend on it.
            with suppress(WeightsCorrupt):
                self._apply(self._chain[digests.index(self._holds) + 1 :], self._holds)
                self._verify(newest)
                return
        anchor = self._chain[0]
        self._load(anchor)
        self._apply(self._chain[1:], anchor.fingerprint.digest)
        self._verify(newest)

    def _load(self, anchor: _Stored) -> None:
        self._holds = None
        data = self._file(anchor)
        try:
            tensors = safetensors.torch.load(bytes(data))
        except safetensors.SafetensorError as error:
            raise WeightsCorrupt(f"{anchor}: not a safetensors file: {error}") from error
        # Nothing may hold on to the buffer's old file while it makes a larger one.
        self._tensors = {}
        self._tensors = self._buffer.tensors_for(shapes_of(tensors))
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)

    def _apply(self, deltas: Iterable[_Stored], holds: str) -> None:
        self._holds = None
        for stored in deltas:
            data = self._file(stored)
            try:
                holds = delta.apply(self._tensors, data, holds=holds)
            except WeightsCorrupt as error:
                raise WeightsCorrupt(f"{stored}: {error}") from error

    def _file(self, stored: _Stored) -> memoryview:
        try:
            return get_file(self._store, stored.file, record=stored.seq)
        except StreamCorrupt as error:
            raise WeightsCorrupt(f"weights of version {stored.manifest.id.policy_version}: {error}") from error

    def _verify(self, newest: _Stored) -> None:
        newest.fingerprint.verify(self._tensors, str(newest))
        self._holds = newest.fingerprint.digest


def _stored(record: Record) -> _Stored | None:
    """The version in a record; None for a fence."""
    if record.kind != "checkpoint":
        return None
    try:
        state, files = record.body["state"], record.body["files"]
        manifest = Manifest.from_json(state["manifest"])
        if manifest.fingerprint is None:
            raise ValueError("no fingerprint")
        return _Stored(
            manifest=manifest,
            fingerprint=manifest.fingerprint,
            is_anchor=state["kind"] != "delta",
            file=FileRef(**files[_FILES[state["kind"]]]),
            seq=record.seq,
        )
    except (KeyError, TypeError, ValueError) as error:
        file = f"{layout.WEIGHTS}/{layout.record(record.seq)}"
        raise StreamCorrupt(file, f"not a record of weights: {error!r}") from error
