"""Which transport carries weights between which two stages.

shm, store   trainer ──whole, in shared memory──► sync_weights ──`weights.transport`──► generator ×G
direct       trainer rank ×T ══════shards, as sync_weights says══════════════════════► generator ×G
                                                  sync_weights ╌╌╌╌╌╌╌╌╌store╌╌╌╌╌╌╌╌╌► one that is late
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from configs.operation import WeightsConfig
from millrace.weights.base import WeightsReader, WeightsWriter
from millrace.weights.direct.control import DirectRelay
from millrace.weights.direct.generator import DirectReader
from millrace.weights.direct.stored import DirectStore
from millrace.weights.direct.trainer import ShardSender
from millrace.weights.fallback import FallbackReader
from millrace.weights.shm import HandoverRelay, HandoverWriter, ShmReader
from millrace.weights.store import StoreReader, StoreWriter
from millrace.weights.transfer.layout import Layout
from storage.progress import read_status
from storage.stores.base import Store

_HANDOVER = "handover"


def trainer_end(handover: Path, like: Mapping[str, torch.Tensor], num_generators: int) -> WeightsWriter:
    """Where the trainer offers each new version; `like` has the generators' names, dtypes and shapes.

    Raises ValueError for more generators than the handover file has room for.
    """
    return HandoverWriter(handover / _HANDOVER, like, num_generators)


def rank_end(config: WeightsConfig, store: Store, layout: Layout, rank: int) -> ShardSender:
    """Where rank `rank` of the trainer offers its shards, as `layout` says, for the transport `direct`."""
    # Where generators receive: in the CPU's memory.
    cpu = torch.device("cpu")
    return ShardSender(_finder(store), layout, rank, device=cpu, deadline_seconds=config.deadline_seconds)


def sync_weights_ends(
    config: WeightsConfig, store: Store, handover: Path, num_generators: int
) -> tuple[WeightsReader, WeightsWriter]:
    """Where sync_weights takes what the trainer offered, and where it offers that to the generators."""
    if config.transport == "direct":
        direct = DirectRelay(num_generators, host=config.host, deadline_seconds=config.deadline_seconds)
        return direct, direct
    relay = HandoverRelay(handover / _HANDOVER)
    return relay, relay if config.transport == "shm" else StoreWriter(store)


def store_end(
    config: WeightsConfig, store: Store, handover: Path, writer: WeightsWriter
) -> Callable[[], WeightsWriter] | None:
    """Opens what brings a version to generators that are late; None if `writer` does that already."""
    match config.transport:
        case "shm":
            return lambda: StoreWriter(store)
        case "direct":
            assert isinstance(writer, DirectRelay)
            path = handover / "received-to-store"
            return lambda: DirectStore(writer, StoreWriter(store), path, deadline_seconds=config.deadline_seconds)
        case "store":
            return None


def generator_end(config: WeightsConfig, store: Store, handover: Path, generator: int) -> FallbackReader:
    """Where generator number `generator` takes new versions: what the transport does not bring, it finds in `store`."""

    def received(transport: str) -> Path:
        return handover / f"received-{transport}-{generator}"

    stored = StoreReader(store, received("store"))
    match config.transport:
        case "shm":
            primary: WeightsReader = ShmReader(handover / _HANDOVER, generator)
        case "direct":
            primary = DirectReader(
                _finder(store), generator, received("direct"), deadline_seconds=config.deadline_seconds
            )
        case "store":
            return FallbackReader(stored, None, route="store")
    return FallbackReader(primary, stored, route=config.transport)


def _finder(store: Store) -> Callable[[], str | None]:
    """Where sync_weights listens, `host:port`; None if it has not said so yet."""

    def find() -> str | None:
        found: str | None = read_status(store, "sync_weights", 0).get("address")
        return found

    return find
