"""Which transport carries weights between which two stages.

trainer ──handover (shared memory, always)──► sync_weights ──`weights.transport`──► generator ×G
                                                    └╌╌╌╌╌╌╌╌store╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌► one that is late
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from millrace.weights.base import WeightsWriter
from millrace.weights.broadcast import BroadcastReader, BroadcastWriter
from millrace.weights.fallback import FallbackReader
from millrace.weights.shm import HandoverReader, HandoverWriter, ShmPush, ShmReader
from millrace.weights.store import StoreReader, StoreWriter
from storage.progress import read_life
from storage.store import Store

_HANDOVER = "handover"


def trainer_end(handover: Path, like: Mapping[str, torch.Tensor], num_generators: int) -> WeightsWriter:
    """Where the trainer offers each new version; `like` has the generators' names, dtypes and shapes.

    Raises ValueError for more generators than the handover file has room for.
    """
    return HandoverWriter(handover / _HANDOVER, like, num_generators)


def handover_end(handover: Path) -> HandoverReader:
    """Where sync_weights takes what the trainer offered."""
    return HandoverReader(handover / _HANDOVER)


def push_end(
    transport: str, store: Store, reader: HandoverReader, num_generators: int, *, host: str, deadline_seconds: float
) -> WeightsWriter:
    """Where sync_weights offers the generators what it took last from `reader`.

    `host` is the address to listen at for `broadcast`. Who has not taken part after `deadline_seconds` is given up.
    """
    if transport == "store":
        return StoreWriter(store)
    if transport == "broadcast":
        return BroadcastWriter(num_generators, host=host, deadline_seconds=deadline_seconds)
    return ShmPush(reader)


def generator_end(
    transport: str, store: Store, handover: Path, generator: int, *, deadline_seconds: float
) -> FallbackReader:
    """Where generator number `generator` takes new versions; what does not come by the transport, it finds in `store`.

    For `broadcast` it waits no longer than `deadline_seconds` for the end of a push that it takes part in.
    """
    stored = StoreReader(store, _landing(handover, "store", generator))
    if transport == "store":
        return FallbackReader(stored, None, route=transport)
    if transport == "broadcast":
        landing = _landing(handover, transport, generator)
        broadcast = BroadcastReader(lambda: _address(store), generator, landing, deadline_seconds=deadline_seconds)
        return FallbackReader(broadcast, stored, route=transport)
    return FallbackReader(ShmReader(handover / _HANDOVER, generator), stored, route=transport)


def _landing(handover: Path, transport: str, generator: int) -> Path:
    return handover / f"landing-{transport}-{generator}"


def _address(store: Store) -> str | None:
    """Where sync_weights listens, as `host:port`; None while it does not."""
    address: str | None = read_life(store, "sync_weights", 0).get("address")
    return address
