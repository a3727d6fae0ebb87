"""Opens the transports of the config between trainer, sync_weights and generators.

shm, store   trainer ──whole, in shared memory──► sync_weights ──`weights.transport`──► generator ×G
direct       trainer rank ×T ══════shards, led by sync_weights═══════════════════════► generator ×G
                                                  sync_weights ╌╌╌╌╌╌╌╌╌store╌╌╌╌╌╌╌╌╌► late generators
live         trainer rank ×T ══════vLLM's engines, led by sync_weights═══► vLLM's workers of generator ×G; late as above

A generator's engine maps the received file (`Weights.shared`) and loads it, or serves the push that brings the weights
(`Weights.live`); vLLM does so through its weight-transfer interface (`millrace/generation/engines/vllm`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from configs.operation import SHARDED, WeightsConfig
from millrace.weights.base import HandoverReceiver, HandoverSender, WeightsReceiver, WeightsSender
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.receiver import DirectReceiver
from millrace.weights.direct.relay import DirectRelay, StoreOfDirect
from millrace.weights.direct.sender import ShardSender
from millrace.weights.fallback import FallbackReceiver
from millrace.weights.live.receiver import LiveReceiver
from millrace.weights.shm import ShmReceiver, ShmRelay, ShmSender
from millrace.weights.store import StoreReceiver, StoreSender
from storage.progress import read_status
from storage.stores.base import Store

_HANDOVER = "handover"


def trainer_end(handover: Path, like: Mapping[str, torch.Tensor], num_generators: int) -> HandoverSender:
    """Opens the trainer's end of the handover; `like` has the generators' names, dtypes and shapes.

    Raises ValueError for more generators than the handover file has room for.
    """
    return ShmSender(handover / _HANDOVER, like, num_generators)


def rank_end(
    config: WeightsConfig,
    store: Store,
    layout: ShardLayout,
    rank: int,
    device: torch.device,
    *,
    workers: int = 1,
    shared: bool = False,
) -> ShardSender:
    """Opens the end of trainer rank `rank`, which publishes its shards of `layout`; see `ShardSender`."""
    return ShardSender(
        _finder(store),
        layout,
        rank,
        device=device,
        deadline_seconds=config.deadline_seconds,
        transport=config.transport,
        workers=workers,
        shared=shared,
    )


def sync_weights_ends(
    config: WeightsConfig, store: Store, handover: Path, num_generators: int, *, host: str, log: Callable[[str], None]
) -> tuple[HandoverReceiver, WeightsSender]:
    """Opens the ends of sync_weights: towards the trainer, and towards the generators. `direct` listens at `host`."""
    if config.transport in SHARDED:
        direct = DirectRelay(num_generators, host=host, deadline_seconds=config.deadline_seconds, log=log)
        return direct, direct
    relay = ShmRelay(handover / _HANDOVER)
    return relay, relay if config.transport == "shm" else StoreSender(store)


def store_end(
    config: WeightsConfig, store: Store, handover: Path, sender: WeightsSender
) -> Callable[[], WeightsSender] | None:
    """Returns a function that opens the route for late generators; None if `sender` is that route already."""
    match config.transport:
        case "shm":
            return lambda: StoreSender(store)
        case "store":
            return None
        case _:
            assert isinstance(sender, DirectRelay)
            path = handover / "received-to-store"
            return lambda: StoreOfDirect(sender, StoreSender(store), path, deadline_seconds=config.deadline_seconds)


def generator_end(config: WeightsConfig, store: Store, handover: Path, generator: int) -> FallbackReceiver:
    """Opens the end of generator number `generator`: the transport, with the run's store to fall back to."""
    stored = StoreReceiver(store, handover / f"received-store-{generator}")
    primary: WeightsReceiver
    match config.transport:
        case "shm":
            primary = ShmReceiver(handover / _HANDOVER, generator)
        case "direct":
            path = handover / f"received-direct-{generator}"
            primary = DirectReceiver(_finder(store), generator, path, deadline_seconds=config.deadline_seconds)
        case "store":
            return FallbackReceiver(stored, None, route="store")
        case _:
            primary = LiveReceiver(_finder(store), generator, deadline_seconds=config.deadline_seconds)
    return FallbackReceiver(primary, stored, route=config.transport)


def _finder(store: Store) -> Callable[[], str | None]:
    """Returns a function that looks up where sync_weights listens, `host:port`; None if not published yet."""
    return lambda: read_status(store, "sync_weights", 0).get("address")
