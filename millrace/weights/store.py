"""Weights through the run's own store: any distance, and whoever comes late finds the newest.

StoreWriter.offer ──► weights/data/<version>-<uuid>/weights.safetensors ──► weights/log: one record ──► StoreReader
"""

import dataclasses

import safetensors.torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReader, WeightsWriter
from storage import layout
from storage.checkpoints import Checkpoint, CheckpointReader, CheckpointWriter, load_file
from storage.errors import StreamCorrupt
from storage.store import Store

_FILE = "weights.safetensors"


class StoreWriter(WeightsWriter):
    """Commits each version whole; opening it ends an older sync_weights stage."""

    def __init__(self, store: Store) -> None:
        self._log = CheckpointWriter(store, layout.WEIGHTS, writer="sync_weights")

    def offer(self, weights: Weights) -> None:
        data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.tensors.items()})
        self._log.commit(weights.id.policy_version, {_FILE: data}, dataclasses.asdict(weights.id))

    def close(self) -> None:
        """Nothing is held open between two commits."""


class StoreReader(WeightsReader):
    """Follows the log of versions and gets the file of the newest one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._log = CheckpointReader(store, layout.WEIGHTS)

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        newest = self._log.latest()
        if newest is None or not (weights_id := _id(newest)).newer_than(newer_than):
            return None
        try:
            data = load_file(self._store, newest.files[_FILE])
        except StreamCorrupt as error:
            raise WeightsCorrupt(f"weights of version {weights_id.policy_version} are damaged: {error}") from error
        return Weights(id=weights_id, tensors=safetensors.torch.load(data))

    def close(self) -> None:
        """Nothing is held open between two reads."""


def _id(checkpoint: Checkpoint) -> WeightsId:
    return WeightsId(**checkpoint.state)
