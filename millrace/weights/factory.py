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
from millrace.weights.direct.receiver import DirectReceiver, LiveReceiver
from millrace.weights.direct.relay import DirectRelay, StoreOfDirect
from millrace.weights.fallback import FallbackReceiver
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


def sync_weights_ends(
    config: WeightsConfig, store: Store, handover: Path, num_generators: int, *, host: str, log: Callable[[str], None]
) -> tuple[HandoverReceiver, WeightsSender, Callable[[], WeightsSender] | None]:
    """Opens the ends of sync_weights: towards the trainer, and towards the generators. `direct` listens at `host`.

    The third result opens the route for late generators; None if the store is the transport.
    """
    if config.transport in SHARDED:
        seconds, path = config.deadline_seconds, handover / "received-to-store"
        relay = DirectRelay(num_generators, host=host, deadline_seconds=seconds, log=log)
        return relay, relay, lambda: StoreOfDirect(relay, StoreSender(store), path, deadline_seconds=seconds)
    shm = ShmRelay(handover / _HANDOVER)
    if config.transport == "shm":
        return shm, shm, lambda: StoreSender(store)
    return shm, StoreSender(store), None


def generator_end(config: WeightsConfig, store: Store, handover: Path, generator: int) -> FallbackReceiver:
    """Opens the end of generator number `generator`: the transport, with the run's store to fall back to."""
    stored = StoreReceiver(store, handover / f"received-store-{generator}")
    primary: WeightsReceiver
    match config.transport:
        case "shm":
            primary = ShmReceiver(handover / _HANDOVER, generator)
        case "direct":
            path = handover / f"received-direct-{generator}"
            primary = DirectReceiver(finder(store), generator, path, deadline_seconds=config.deadline_seconds)
        case "store":
            return FallbackReceiver(stored, None, route="store")
        case _:
            primary = LiveReceiver(finder(store), generator, deadline_seconds=config.deadline_seconds)
    return FallbackReceiver(primary, stored, route=config.transport)


def finder(store: Store) -> Callable[[], str | None]:
    """Returns a function that looks up where sync_weights listens, `host:port`; None if not published yet."""
    return lambda: read_status(store, "sync_weights", 0).get("address")
