"""Pushes in this process: trainer ranks and sync_weights as threads, and engines that take part or receive."""

import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from support.weights.direct import PATIENT, finder, publish_address
from support.weights.direct_policies import layout_of, shards

from millrace.errors import WeightsNotReceived
from millrace.weights.base import Manifest, Weights, WeightsId, WeightsReceiver
from millrace.weights.direct.receiver import DirectReceiver, LiveReceiver
from millrace.weights.direct.relay import DirectRelay
from millrace.weights.direct.sender import ShardSender
from millrace.weights.live.calls import LiveTransfer


class LivePushes:
    """Ranks of a trainer that shard these tensors, the receivers of generators, and sync_weights.

    `transport`: a live one, or `direct`. `leads`: sync_weights runs in a thread.
    """

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, torch.Tensor],
        *,
        ranks: int = 1,
        workers: int = 1,
        num_generators: int = 1,
        deadline_seconds: float = PATIENT,
        transport: str = "gloo",
        leads: bool = False,
    ) -> None:
        self.layout = layout_of(tensors, ranks)
        self.logged: list[str] = []
        live = transport != "direct"
        self.relay = DirectRelay(num_generators, deadline_seconds=deadline_seconds, log=self.logged.append)
        publish_address(folder, self.relay.address)
        find, cpu = finder(folder), torch.device("cpu")
        self.ranks = [
            ShardSender(
                find,
                self.layout,
                rank,
                device=cpu,
                deadline_seconds=deadline_seconds,
                transport=transport,
                workers=workers,
            )
            for rank in range(ranks)
        ]
        self.receivers: list[LiveReceiver | DirectReceiver] = [
            LiveReceiver(find, number, deadline_seconds=deadline_seconds)
            if live
            else DirectReceiver(find, number, folder / f"received-{number}", deadline_seconds=deadline_seconds)
            for number in range(num_generators)
        ]
        self.newest: WeightsId | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._lead)
        if leads:
            self._thread.start()

    def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """Has each rank take its shards of a version."""
        manifest = Manifest(id=WeightsId(incarnation=0, policy_version=version, t_offered=version + 0.5))
        for rank, sender in enumerate(self.ranks):
            sender.publish(Weights(manifest=manifest, tensors=shards(tensors, self.layout, rank)))

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for end in (*self.ranks, *self.receivers, self.relay):
            end.close()

    def _lead(self) -> None:
        while not self._ended.wait(0.01):
            weights = self.relay.poll(self.newest)
            if weights is not None:
                self.newest = weights.id
                self.relay.publish(weights)


class Serves(Protocol):
    """The part of an engine that new weights need."""

    def update_weights(self, weights: Weights) -> float:
        """Loads the weights, as `Engine.update_weights`."""


class RecordingEngine:
    """Records the calls that it serves, and raises an error at the first call of `fails_at`."""

    def __init__(self, fails_at: str | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._fails_at = fails_at

    def update_weights(self, weights: Weights) -> float:
        push = weights.live
        assert isinstance(push, LiveTransfer)
        try:
            for method, argument in push.calls():
                self.calls.append((method, argument))
                if method == self._fails_at:
                    self._fails_at = None
                    raise WeightsNotReceived("the test's error")
        except WeightsNotReceived as error:
            push.end(str(error))
            raise
        return 0.0


def serve(engine: Serves, receiver: WeightsReceiver, held: WeightsId | None) -> WeightsId | None:
    """Takes a generator's turn: joins a push or loads weights, if there are any. Returns the engine's version."""
    weights = receiver.poll(held)
    if weights is None or (weights.live is not None and not weights.live.join()):
        time.sleep(0.01)
        return held
    try:
        engine.update_weights(weights)
    except WeightsNotReceived as error:
        print(error, file=sys.stderr)
        return held
    return weights.id
