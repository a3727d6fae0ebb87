"""sync_weights and a generator, as processes next to the trainer's. Each reports through a pipe when it did what.

    sync_weights   {}, then per version: take ─► offer
    generator      {}, then per version: take ─► copy into its own parameters

Both look for a new version as often as the stages do while they wait. They end with the trainer's process.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from millrace.weights.base import HandoverReceiver, Weights, WeightsReceiver, WeightsSender
from millrace.weights.direct.receiver import DirectReceiver
from millrace.weights.direct.relay import DirectRelay
from millrace.weights.fingerprint import fingerprint
from millrace.weights.shm import ShmReceiver, ShmRelay

_POLL_SECONDS = 0.002  # as stages look at a local store
DEADLINE_SECONDS = 60.0
"""For a push by `direct`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Where the processes find each other."""

    transport: str
    """`shm`, `direct` or `store`."""
    folder: Path
    """In shared memory, for the handover and receive buffers."""
    store: str
    """URL of the run's store."""
    device: str
    """Where the generator's parameters are: `cpu` or `cuda`."""

    @property
    def handover(self) -> Path:
        """The handover's file."""
        return self.folder / "handover"

    @property
    def address(self) -> Path:
        """The file that says where sync_weights listens, for `direct`."""
        return self.folder / "address"


@contextmanager
def started(setup: Setup) -> Iterator[tuple[Connection, Connection]]:
    """The pipes from which the reports of sync_weights and of a generator come, once both are ready."""
    context = multiprocessing.get_context("spawn")
    processes = []

    def start(target: Callable[[Setup, Connection], None]) -> Connection:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=target, args=(setup, sending), daemon=True)
        process.start()
        processes.append(process)
        # Only the process holds it now, so that the pipe ends with the process.
        sending.close()
        next_report(receiving)
        return receiving

    try:
        yield start(_sync_weights), start(_generate)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def next_report(process: Connection) -> dict[str, Any]:
    """The next report. Raises RuntimeError if the process has ended."""
    try:
        report: dict[str, Any] = process.recv()
    except EOFError as error:
        raise RuntimeError("a process of the benchmark ended early; see its output for the reason") from error
    return report


def _sync_weights(setup: Setup, reports: Connection) -> None:
    """Hands on version after version. Reports when each was taken and offered, and its digest."""
    torch.set_num_threads(1)
    receiver, sender = _relay(setup)
    with closing(receiver), closing(sender):
        setup.address.write_text(sender.address or "")
        reports.send({})
        for _, weights in _versions(receiver):
            taken = time.monotonic()
            sender.publish(weights)
            reports.send({"taken": taken, "offered": time.monotonic(), "digest": weights.fingerprint.digest})


def _generate(setup: Setup, reports: Connection) -> None:
    """Loads version after version. Reports when each was found, verified and live, and the digest of what is live."""
    torch.set_num_threads(1)
    parameters: dict[str, torch.Tensor] = {}
    with closing(_receiver(setup)) as receiver:
        reports.send({})
        for looked, weights in _versions(receiver):
            taken = time.monotonic()
            for name, tensor in weights.tensors.items():
                if name not in parameters:
                    parameters[name] = torch.empty_like(tensor, device=setup.device)
                parameters[name].copy_(tensor)
            if setup.device == "cuda":
                torch.cuda.synchronize()
            live = time.monotonic()
            digest = weights.fingerprint.digest
            loaded = fingerprint(parameters).digest
            reports.send({"found": looked, "taken": taken, "live": live, "digest": digest, "loaded": loaded})


def _relay(setup: Setup) -> tuple[HandoverReceiver, WeightsSender]:
    if setup.transport == "direct":
        direct = DirectRelay(1, deadline_seconds=DEADLINE_SECONDS)
        return direct, direct
    relay = ShmRelay(setup.handover)
    if setup.transport == "store":
        # Late, as below: shared memory alone needs only torch, numpy and xxhash.
        from millrace.weights.store import StoreSender
        from storage.stores.factory import open_store

        return relay, StoreSender(open_store(setup.store))
    return relay, relay


def _receiver(setup: Setup) -> WeightsReceiver:
    received = setup.folder / "received"
    if setup.transport == "direct":
        return DirectReceiver(setup.address.read_text, 0, received, deadline_seconds=DEADLINE_SECONDS)
    if setup.transport == "store":
        from millrace.weights.store import StoreReceiver
        from storage.stores.factory import open_store

        return StoreReceiver(open_store(setup.store), received)
    return ShmReceiver(setup.handover, 0)


def _versions(receiver: WeightsReceiver) -> Iterator[tuple[float, Weights]]:
    """Each new version, and when the look that found it began, until the trainer's process is gone."""
    parent, newest = os.getppid(), None
    while os.getppid() == parent:
        looked = time.monotonic()
        weights = receiver.poll(newest)
        if weights is None:
            time.sleep(_POLL_SECONDS)
        else:
            newest = weights.id
            yield looked, weights
