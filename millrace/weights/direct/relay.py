"""sync_weights' end of `direct`: it learns of versions, leads pushes, and moves no tensor.

    trainer ranks: offered, with sums ─► poll: the newest that all ranks hold
    publish ─► who is there? ─► they push ─► which generators have it?
    poll    ─► who is back?  ─► the same, to those

A generator that dies or stands still delays the others once, by a quarter of the deadline, and is not waited for again
until it is back. A version that does not get through is tried once more at once; after that the caller decides.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import HandoverReceiver, Manifest, Weights, WeightsId, WeightsSender
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.receiver import DirectReceiver
from millrace.weights.direct.rendezvous import PATIENCE, Go, Rendezvous, generator_name, trainer_name
from millrace.weights.fingerprint import Region, add_sums, names_of, sums_as_fingerprint
from storage.failpoints import failpoint

_ATTEMPTS = 2
_LOOK_SECONDS = 0.05  # between two looks for generators that are back
_SHORTEST_WAIT = 0.001  # seconds: 0 would be no timeout at all


class DirectRelay(HandoverReceiver, WeightsSender):
    """Both ends of sync_weights, for generators 0 … num_generators − 1. Listens at `host`, at a free port.

    Raises InputError if this machine has no such address.
    """

    def __init__(self, num_generators: int, *, host: str = "127.0.0.1", deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._rendezvous = Rendezvous(host)
        self.address: str = self._rendezvous.address
        self.num_generators = num_generators
        # With the token of its rank 0, and the boxes of each rank.
        self._source: tuple[str, ShardLayout, list[dict[str, Region]]] | None = None
        self._weights: Weights | None = None
        # The tokens with which generators got the version, and of those that did not answer.
        self._served: dict[int, str] = {}
        self._given_up: dict[int, str | None] = {}
        # What is wrong with the version that a generator received last.
        self._damage = ""
        self._resends = 0
        self._group = ""
        self._members: dict[str, str] = {}
        self._look_at = 0.0

    @property
    def missing(self) -> set[int]:
        """Generators that do not have the version published last."""
        return {g for g in range(self.num_generators) if g not in self._served or self._served[g] != self._token(g)}

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest version that all trainer ranks hold, if it is newer; its tensors have no values.

        If there is none, has the version published last sent to generators that lack it and are back. Raises
        WeightsCorrupt if ranks that should hold the same values do not.
        """
        weights = self._offered(newer_than)
        if weights is None and self._weights is not None and time.monotonic() >= self._look_at and self.missing:
            self._serve(self._weights)
        return weights

    def verify(self, weights: Weights) -> None:
        """Raises WeightsCorrupt if `weights`, published last, arrived damaged at the last generator to receive them."""
        if self._damage:
            raise WeightsCorrupt(self._damage)

    def request_resend(self) -> None:
        self._resends, self._damage = self._rendezvous.request_resend(), ""

    def publish(self, weights: Weights) -> None:
        """Has the trainer send these to all generators that are there; returns when they have them, or after the
        deadline. `missing` then names the generators without them."""
        self._weights, self._damage = weights, ""
        self._served = {}
        self._serve(weights)

    def send_to(self, number: int, weights: Weights) -> None:
        """Has the trainer send a version to one more receiver, number `number`, once it has joined; by the deadline."""
        until = time.monotonic() + self._deadline_seconds
        while self._token(number) is None and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        self._push(weights, [number], until)

    def close(self) -> None:
        """Stops listening; the others then look for a successor."""
        self._rendezvous.close()

    def _token(self, generator: int) -> str | None:
        return self._rendezvous.token(generator_name(generator))

    def _layout(self) -> tuple[ShardLayout, list[dict[str, Region]]] | None:
        """The trainer's, and the boxes of each rank; None before it has joined."""
        token = self._rendezvous.token(trainer_name(0))
        if token is None:
            return None
        if self._source is None or self._source[0] != token:
            layout = self._rendezvous.layout()
            self._source = token, layout, [layout.boxes(rank) for rank in range(layout.size)]
        return self._source[1:]

    def _offered(self, newer_than: WeightsId | None) -> Weights | None:
        if not self._rendezvous.offers_changed() and newer_than is not None:
            return None
        source = self._layout()
        if source is None:
            return None
        layout, boxes = source
        offers = [self._rendezvous.offered(trainer_name(rank)) for rank in range(layout.size)]
        held = [offer for offer in offers if offer is not None]
        manifests = [Manifest.from_json(offer["manifest"]) for offer in held]
        if len(held) < layout.size or len({manifest.id for manifest in manifests}) > 1:
            # The last of them makes the number of offers change again.
            return None
        if max(offer["resends"] for offer in held) < self._resends:
            # Still the damaged version.
            return None
        if not manifests[0].id.newer_than(newer_than):
            return None
        fingerprint = sums_as_fingerprint(_whole_sums(layout, boxes, [offer["sums"] for offer in held]))
        tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            for spec in layout.tensors
        }
        failpoint("direct.taken")
        return Weights(manifest=dataclasses.replace(manifests[0], fingerprint=fingerprint), tensors=tensors)

    def _serve(self, weights: Weights) -> None:
        until = time.monotonic() + self._deadline_seconds
        for _ in range(_ATTEMPTS):
            if asked := self._present():
                self._push(weights, asked, until)
        # Retry slowly while a generator is there that can't receive the version: it would take up all our time.
        again = self._deadline_seconds * PATIENCE if self._present() else _LOOK_SECONDS
        self._look_at = time.monotonic() + again

    def _present(self) -> list[int]:
        """Generators that lack the version and, for all we know, would receive it."""
        tokens = {g: self._token(g) for g in range(self.num_generators)}
        return [g for g, token in tokens.items() if token not in (None, self._served.get(g), self._given_up.get(g))]

    def _push(self, weights: Weights, asked: list[int], until: float) -> None:
        source = self._layout()
        assert source is not None
        trainers = [trainer_name(rank) for rank in range(source[0].size)]
        push = self._rendezvous.announce(weights.manifest, [*trainers, *map(generator_name, asked)])
        failpoint("direct.announced")
        answers = self._rendezvous.ready(push, self._patience(until))
        for generator in asked:
            # Before the others go: a generator that finds them gone joins with another token.
            if generator_name(generator) in answers:
                self._given_up.pop(generator, None)
            else:
                self._given_up[generator] = self._token(generator)
        members = {name: answers[name]["token"] for name in push.asked if name in answers}
        generators = [g for g in asked if generator_name(g) in members]
        held = dataclasses.asdict(push.id)
        if generators and all(name in members and answers[name]["held"] == held for name in trainers):
            if self._members != members:
                # The group is good only for these very processes.
                self._members, self._group = members, str(push.number)
            self._rendezvous.go(push, Go(group=self._group, members=tuple(members)))
            failpoint("direct.gone")
            done = self._rendezvous.done(push, members, self._patience(until, share=1.0))
            failpoint("direct.done")
            self._conclude(push.id.policy_version, generators, done)
        self._rendezvous.finish(push)

    def _conclude(self, policy_version: int, generators: list[int], done: dict[str, dict[str, Any]]) -> None:
        """Notes which generators have the version, by the answers of the members."""
        members = self._members
        if len(done) < len(members) or any(answer["wrong"] for answer in done.values()):
            self._group, self._members = "", {}
        for generator in generators:
            name = generator_name(generator)
            answer = done.get(name, {"wrong": f"{name} did not answer in time", "damaged": False})
            if answer["wrong"]:
                print(f"direct: version {policy_version}: {name}: {answer['wrong']}", file=sys.stderr)
            else:
                self._served[generator] = members[name]
            if answer["damaged"] or not answer["wrong"]:
                self._damage = answer["wrong"]

    def _patience(self, until: float, *, share: float = PATIENCE) -> float:
        return max(_SHORTEST_WAIT, min(self._deadline_seconds * share, until - time.monotonic()))


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


def _whole_sums(
    layout: ShardLayout, boxes: Sequence[dict[str, Region]], offered: list[dict[str, int]]
) -> dict[str, int]:
    """The sum of each whole tensor, out of the ranks' sums of their boxes; a box that several ranks hold counts once.

    Raises WeightsCorrupt, naming tensors, if ranks with the same box have different sums.
    """
    sums: dict[str, int] = {}
    differing = []
    for spec in layout.tensors:
        by_box: dict[Region, int] = {}
        for parts, values in zip(boxes, offered, strict=True):
            box = parts.get(spec.name)
            if box is not None and by_box.setdefault(box, values[spec.name]) != values[spec.name]:
                differing.append(spec.name)
        sums[spec.name] = add_sums(by_box.values())
    if differing:
        raise WeightsCorrupt(f"trainer ranks hold different values of {names_of(dict.fromkeys(differing))}")
    return sums
