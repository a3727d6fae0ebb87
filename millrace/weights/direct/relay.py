"""sync_weights' end of `direct` and of live transports: it learns of versions, leads pushes, and moves no tensor.

    trainer ranks: offers, with hashes ─► poll: the newest that all ranks hold
    publish ─► who requests it? ─► push to those ─► poll: who requests it since? ─► push to those

A generator that dies or stands still delays the others once, by a quarter of the deadline, and is not waited for again
until it requests a version. The caller decides how a generator without the version is served.
"""

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from configs.operation import LIVE
from millrace.errors import WeightsCorrupt
from millrace.weights.base import HandoverReceiver, Weights, WeightsId, WeightsSender
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.member import PATIENCE
from millrace.weights.direct.receiver import DirectReceiver
from millrace.weights.direct.rendezvous import PushRendezvous, generator_name, trainer_name
from millrace.weights.fingerprint import Fingerprint, Method, Region, combine_hashes, names_of
from storage.failpoints import failpoint

_LOOK_SECONDS = 0.05
"""Between two looks for generators that request the version published last."""
_MAX_FAILED = 2
"""Pushes in a row that bring no generator its version, after which their transport is given up."""


class DirectRelay(HandoverReceiver, WeightsSender):
    """Both ends of sync_weights, for generators 0 … num_generators − 1. Listens at `host`, at a free port.

    Pushes use the first transport that the trainer offers. A live one that fails twice in a row is given up; without
    another, generators get versions by the store.

    Raises InputError if this machine has no such address.
    """

    def __init__(
        self,
        num_generators: int,
        *,
        host: str = "127.0.0.1",
        deadline_seconds: float,
        log: Callable[[str], None] = print,
    ) -> None:
        self._deadline_seconds = deadline_seconds
        self._log = log
        self._rendezvous = PushRendezvous(host)
        self.address: str = self._rendezvous.address
        self.num_generators = num_generators
        # The trainer's, at its last offer.
        self._layout = ShardLayout((), data=0)
        self._transports: tuple[str, ...] = ()
        # Pushes by each live transport that failed since the last success.
        self._num_failed = Counter[str]()
        self._weights: Weights | None = None
        # The damage of the version that a generator received last.
        self._damage = ""
        self._next_look = 0.0

    @property
    def missing(self) -> set[int]:
        """Generators that do not have the version published last."""
        newest = None if self._weights is None else dataclasses.asdict(self._weights.id)
        requests = {g: self._rendezvous.request(g) for g in range(self.num_generators)}
        return {g for g, request in requests.items() if request is None or request["held"] != newest or newest is None}

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest version that all trainer ranks hold, if it is newer; its tensors have no values.

        If there is none, has the version published last sent to generators that request it. Raises WeightsCorrupt if
        ranks that should hold the same values do not.
        """
        weights = self._offered(newer_than)
        if weights is None and self._weights is not None and time.monotonic() >= self._next_look:
            self._serve(self._weights)
        return weights

    def verify(self, weights: Weights) -> None:
        """Raises WeightsCorrupt if `weights`, published last, arrived damaged at the last generator to receive them."""
        if self._damage:
            raise WeightsCorrupt(self._damage)

    def request_resend(self) -> None:
        for rank in range(self._layout.size):
            self._rendezvous.drop_offer(rank)
        self._damage = ""

    def publish(self, weights: Weights) -> None:
        """Has the trainer send these to all generators that request them; returns when they have them, or after the
        deadline. `missing` then names the generators without them."""
        self._weights, self._damage = weights, ""
        self._serve(weights)

    def send_to(self, number: int, weights: Weights) -> None:
        """Has the trainer send a version to one more receiver, number `number`, once it has joined; by the deadline."""
        until = time.monotonic() + self._deadline_seconds
        while self._rendezvous.request(number) is None and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        self._push(weights, [number])
        self._rendezvous.drop_request(number)

    def close(self) -> None:
        """Stops listening; the others then look for a successor."""
        self._rendezvous.close()

    def _offered(self, newer_than: WeightsId | None) -> Weights | None:
        if not self._rendezvous.offers_changed() and newer_than is not None:
            return None
        first = self._rendezvous.offer(0)
        if first is None:
            return None
        manifest, layout = first.manifest, first.layout
        offers = map(self._rendezvous.offer, range(layout.size))
        hashes = [offer.hashes for offer in offers if offer is not None and offer.manifest.id == manifest.id]
        # The last rank's offer makes the number of offers change again.
        if len(hashes) < layout.size or not manifest.id.newer_than(newer_than):
            return None
        fingerprint = whole_fingerprint(layout, hashes, "xxh3" if "direct" in first.transports else "sums")
        tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            for spec in layout.tensors
        }
        self._layout = layout
        self._transports = first.transports
        failpoint("direct.taken")
        return Weights(manifest=dataclasses.replace(manifest, fingerprint=fingerprint), tensors=tensors)

    def _serve(self, weights: Weights) -> None:
        requesting = sorted(g for g in self.missing if self._rendezvous.request(g) is not None)
        if requesting and self._transport:
            self._push(weights, requesting, self._transport)
        self._next_look = time.monotonic() + _LOOK_SECONDS

    def _push(self, weights: Weights, generators: list[int], transport: str = "direct") -> None:
        until = time.monotonic() + self._deadline_seconds
        trainers = [trainer_name(rank) for rank in range(self._layout.size)]
        names = [*trainers, *map(generator_name, generators)]
        push = self._rendezvous.announce(weights.manifest, self._layout, names, transport)
        failpoint("direct.announced")
        ready = self._rendezvous.answers("ready", push, names, self._deadline_seconds * PATIENCE)
        members = [name for name in names if ready.get(name)]
        if members[: len(trainers)] == trainers and len(members) > len(trainers):
            self._rendezvous.go(push, {name: ready[name] for name in members})
            failpoint("direct.gone")
            done = self._rendezvous.answers("done", push, members, until - time.monotonic())
            failpoint("direct.done")
            has_arrived = False
            for name in members[len(trainers) :]:
                answer = done.get(name, {"error": f"{name} did not answer in time", "damage": ""})
                has_arrived |= not answer["error"]
                if answer["error"]:
                    print(f"{transport}: version {weights.id.policy_version}: {answer['error']}", file=sys.stderr)
                if answer["damage"] or not answer["error"]:
                    self._damage = answer["damage"]
            if transport in LIVE:
                self._num_failed[transport] = 0 if has_arrived else self._num_failed[transport] + 1
                if self._transport != transport:
                    following = self._transport or "the store"
                    self._log(f"pushes by {transport} fail: weights go by {following} from now on")
        self._rendezvous.finish(push)

    @property
    def _transport(self) -> str:
        """The best one that is not given up; empty if all are."""
        return next((each for each in self._transports if self._num_failed[each] < _MAX_FAILED), "")


class StoreOfDirect(WeightsSender):
    """Stores a version for generators that are late: receives it here, and publishes it to `store_sender`.

    It arrives in files named after `path`. This is the only time that sync_weights holds the whole model.
    """

    def __init__(self, relay: DirectRelay, store_sender: WeightsSender, path: Path, *, deadline_seconds: float) -> None:
        self._relay = relay
        self._store_sender = store_sender
        self._path = path
        self._deadline_seconds = deadline_seconds

    def publish(self, weights: Weights) -> None:
        """Stores the version if it arrives by the deadline."""
        number = self._relay.num_generators
        with closing(
            DirectReceiver(lambda: self._relay.address, number, self._path, deadline_seconds=self._deadline_seconds)
        ) as receiver:
            self._relay.send_to(number, weights)
            received = receiver.poll(None)
            if received is not None:
                self._store_sender.publish(received)

    def close(self) -> None:
        self._store_sender.close()


def whole_fingerprint(
    layout: ShardLayout, offered: Sequence[Mapping[str, str]], method: Method = "xxh3"
) -> Fingerprint:
    """The fingerprint of whole tensors, out of the ranks' hashes of their parts, `offered` in the order of the ranks.

    Raises WeightsCorrupt, naming tensors, if ranks with the same part have different hashes.
    """
    parts: dict[str, dict[Region, str]] = {spec.name: {} for spec in layout.tensors}
    differing = []
    for rank, hashes in enumerate(offered):
        for name, box in layout.boxes(rank).items():
            if parts[name].setdefault(box, hashes[name]) != hashes[name]:
                differing.append(name)
    if differing:
        raise WeightsCorrupt(f"trainer ranks hold different values of {names_of(dict.fromkeys(differing))}")
    return Fingerprint(
        tensors={name: combine_hashes(by_box.values()) for name, by_box in parts.items()},
        boxes={name: tuple(by_box) for name, by_box in parts.items()},
        method=method,
    )
