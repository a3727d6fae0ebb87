"""Which transport carries weights between which two stages.

trainer ──handover (shared memory, always)──► sync_weights ──`weights.transport`──► generator ×G
                                                    └╌╌╌╌╌╌╌╌store╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌► one that is late
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from configs.schema import WeightsConfig
from millrace.weights.base import WeightsReader, WeightsWriter
from millrace.weights.broadcast import BroadcastReader, BroadcastWriter
from millrace.weights.fallback import FallbackReader
from millrace.weights.shm import HandoverRelay, HandoverWriter, ShmReader
from millrace.weights.store import StoreReader, StoreWriter
from storage.progress import read_status
from storage.stores.base import Store

_HANDOVER = "handover"


def trainer_end(handover: Path, like: Mapping[str, torch.Tensor], num_generators: int) -> WeightsWriter:
    """Where the trainer offers each new version; `like` has the generators' names, dtypes and shapes.

    Raises ValueError for more generators than the handover file has room for.
    """
    return HandoverWriter(handover / _HANDOVER, like, num_generators)


def sync_weights_ends(
    config: WeightsConfig, store: Store, handover: Path, num_generators: int
) -> tuple[WeightsReader, WeightsWriter]:
    """Where sync_weights takes what the trainer offered, and where it offers that to the generators."""
    relay = HandoverRelay(handover / _HANDOVER)
    match config.transport:
        case "shm":
            return relay, relay
        case "broadcast":
            return relay, BroadcastWriter(num_generators, host=config.host, deadline_seconds=config.deadline_seconds)
        case "store":
            return relay, StoreWriter(store)


def generator_end(config: WeightsConfig, store: Store, handover: Path, generator: int) -> FallbackReader:
    """Where generator number `generator` takes new versions: what the transport does not bring, it finds in `store`."""

    def received(transport: str) -> Path:
        return handover / f"received-{transport}-{generator}"

    def address() -> str | None:
        found: str | None = read_status(store, "sync_weights", 0).get("address")
        return found

    stored = StoreReader(store, received("store"))
    match config.transport:
        case "shm":
            primary: WeightsReader = ShmReader(handover / _HANDOVER, generator)
        case "broadcast":
            primary = BroadcastReader(
                address, generator, received("broadcast"), deadline_seconds=config.deadline_seconds
            )
        case "store":
            return FallbackReader(stored, None, route="store")
    return FallbackReader(primary, stored, route=config.transport)
