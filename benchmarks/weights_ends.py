"""The two processes beside the trainer: sync_weights, and one generator. Each says on standard output when it did what.

    python -m benchmarks.weights_ends sync ROUTE        {"address": …}, then a version: take ─► offer
    python -m benchmarks.weights_ends generator ROUTE   {}, then a version: take ─► copy into its own parameters

Both look for something new as often as the stages do while they wait. They end when nobody reads what they say.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from millrace.weights.base import Weights, WeightsReader, WeightsWriter
from millrace.weights.broadcast import BroadcastReader, BroadcastWriter
from millrace.weights.fingerprint import fingerprint
from millrace.weights.shm import HandoverReader, ShmPush, ShmReader

POLL_SECONDS = 0.002
"""As stages look at a local store."""
_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """By which way versions travel."""

    transport: str
    """`shm`, `broadcast` or `store`."""
    folder: str
    """In shared memory, for the handover and landings."""
    store: str
    """URL of the run's store."""
    device: str
    """Where the generator's parameters are: `cpu` or `cuda`."""
    address: str | None = None
    """Where sync_weights listens, for `broadcast`."""

    @property
    def handover(self) -> Path:
        """The handover's file."""
        return Path(self.folder, "handover")

    def to_json(self) -> str:
        """For the command line of a process."""
        return json.dumps(asdict(self))


def sync(route: Route) -> None:
    """Hands on version after version. Says of each when it was taken, and when the offer was made, and its digest."""
    with closing(HandoverReader(route.handover)) as reader, closing(_writer(route, reader)) as writer:
        _say(address=writer.address if isinstance(writer, BroadcastWriter) else None)
        for _, weights in _versions(reader, writer):
            taken = time.monotonic()
            writer.offer(weights)
            assert weights.manifest.fingerprint is not None
            _say(taken=taken, offered=time.monotonic(), digest=weights.manifest.fingerprint.digest)


def generate(route: Route) -> None:
    """Loads version after version. Says of each when it was found, verified and live, and the digest of what is."""
    parameters: dict[str, torch.Tensor] = {}
    with closing(_reader(route)) as reader:
        _say()
        for found, weights in _versions(reader):
            taken = time.monotonic()
            for name, tensor in weights.tensors.items():
                if name not in parameters:
                    parameters[name] = torch.empty_like(tensor, device=route.device)
                parameters[name].copy_(tensor)
            if route.device == "cuda":
                torch.cuda.synchronize()
            live = time.monotonic()
            _say(found=found, taken=taken, live=live, digest=fingerprint(parameters).digest)


def _writer(route: Route, reader: HandoverReader) -> WeightsWriter:
    if route.transport == "broadcast":
        return BroadcastWriter(1, deadline_seconds=_DEADLINE_SECONDS)
    if route.transport == "store":
        # Late, as below: shared memory alone asks for nothing but torch, numpy and xxhash.
        from millrace.weights.store import StoreWriter
        from storage.factory import open_store

        return StoreWriter(open_store(route.store))
    return ShmPush(reader)


def _reader(route: Route) -> WeightsReader:
    landing = Path(route.folder, "landing")
    if route.transport == "broadcast":
        return BroadcastReader(lambda: route.address, 0, landing, deadline_seconds=_DEADLINE_SECONDS)
    if route.transport == "store":
        from millrace.weights.store import StoreReader
        from storage.factory import open_store

        return StoreReader(open_store(route.store), landing)
    return ShmReader(route.handover, 0)


def _versions(reader: WeightsReader, writer: WeightsWriter | None = None) -> Iterator[tuple[float, Weights]]:
    """Each new version, and when the look began that found it, until the trainer's process is gone."""
    parent, newest = os.getppid(), None
    while os.getppid() == parent:
        looked = time.monotonic()
        weights = reader.take(newest)
        if weights is None:
            if writer is not None:
                writer.tend()
            time.sleep(POLL_SECONDS)
        else:
            newest = weights.id
            yield looked, weights


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"sync": sync, "generator": generate}[sys.argv[1]](Route(**json.loads(sys.argv[2])))
