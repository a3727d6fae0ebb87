"""Which transport carries weights between which two stages.

trainer ──handover (shared memory, always)──► sync_weights ──`weights.transport`──► generator ×G
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from millrace.weights.base import WeightsReader, WeightsWriter
from millrace.weights.shm import ShmReader, ShmWriter
from millrace.weights.store import StoreReader, StoreWriter
from storage.store import Store


def trainer_end(handover: Path, like: Mapping[str, torch.Tensor]) -> WeightsWriter:
    """Where the trainer offers each new version; `like` has the model's tensors by name."""
    return ShmWriter(handover / "handover", like, num_readers=1)


def handover_end(handover: Path) -> WeightsReader:
    """Where sync_weights takes what the trainer offered."""
    return ShmReader(handover / "handover", reader=0)


def push_end(
    transport: str, store: Store, handover: Path, like: Mapping[str, torch.Tensor], num_generators: int
) -> WeightsWriter:
    """Where sync_weights offers a version to the generators."""
    if transport == "store":
        return StoreWriter(store)
    return ShmWriter(handover / "generators", like, num_readers=num_generators)


def generator_end(transport: str, store: Store, handover: Path, generator: int) -> WeightsReader:
    """Where generator number `generator` takes new versions."""
    if transport == "store":
        return StoreReader(store)
    return ShmReader(handover / "generators", reader=generator)
