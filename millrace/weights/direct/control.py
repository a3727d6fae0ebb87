"""sync_weights' end of `direct`: it learns of versions, leads pushes, and moves no tensor.

    trainer ranks: offered, with sums ─► take: the newest that all ranks hold
    offer ─► who is there? ─► they push ─► do a generator's sums add up to the trainer's? ─► it may go live
    tend  ─► who is back?  ─► the same, to those

A generator that dies or stands still delays the others once, by a quarter of the deadline, and is not waited for again
until it is back. A version that does not get through is tried once more at once; after that the caller decides.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from millrace.errors import WeightsCorrupt, WeightsMismatch
from millrace.weights.base import Manifest, Weights, WeightsId, WeightsReader, WeightsWriter
from millrace.weights.direct.layouts import Plans
from millrace.weights.direct.rendezvous import Go, Push, Rendezvous, generator_name, trainer_name
from millrace.weights.direct.sums import added, as_hex
from millrace.weights.fingerprint import Fingerprint, names_of
from millrace.weights.transfer.layout import Layout
from millrace.weights.transfer.plan import TransferPlan
from storage.failpoints import failpoint

PATIENCE = 0.25
"""Of the deadline: for any one thing that another process has to do."""
_ATTEMPTS = 2
_LOOK_SECONDS = 0.05  # between two looks for generators that are back
_SHORTEST_WAIT = 0.001  # seconds: 0 would be no timeout at all


class DirectRelay(WeightsReader, WeightsWriter):
    """Both ends of sync_weights, for generators 0 … num_generators − 1. Listens at `host`, at a free port.

    Raises InputError if this machine has no such address.
    """

    def __init__(self, num_generators: int, *, host: str = "127.0.0.1", deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._rendezvous = Rendezvous(host)
        self.address: str = self._rendezvous.address
        self.num_generators = num_generators
        self._missing = set(range(num_generators))
        self._plans = Plans()
        self._source: tuple[str, Layout] | None = None
        self._weights: Weights | None = None
        # What a generator received last, and what is wrong with it.
        self._damage = ""
        self._asked = 0
        # Generators that did not answer, and the token with which they had joined.
        self._given_up: dict[int, str | None] = {}
        self._group = ""
        self._members: dict[str, str] = {}
        self._look_at = 0.0
        self.wire_bytes = 0
        """What all pushes so far have sent, by the plans of those that got through."""

    @property
    def missing(self) -> set[int]:
        """Generators that do not have the version offered last."""
        return set(self._missing)

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest version that all trainer ranks hold, if it is newer; its tensors have no values.

        Raises WeightsCorrupt if ranks that should hold the same values do not.
        """
        if not self._rendezvous.offers_changed() and newer_than is not None:
            return None
        source = self._layout()
        if source is None:
            return None
        offers = [self._rendezvous.offered(trainer_name(rank)) for rank in range(source.size)]
        held = [one for one in offers if one is not None]
        manifests = [Manifest.from_json(one["manifest"]) for one in held]
        if len(held) < source.size or len({manifest.id for manifest in manifests}) > 1:
            # The last of them makes the number of offers change again.
            return None
        if max(one["answers"] for one in held) < self._asked:
            # Still what was damaged.
            return None
        if not manifests[0].id.newer_than(newer_than):
            return None
        sums = _whole_sums(source, [one["sums"] for one in held])
        fingerprint = Fingerprint(tensors={name: as_hex(value) for name, value in sums.items()})
        tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            for spec in source.tensors
        }
        failpoint("direct.taken")
        return Weights(manifest=dataclasses.replace(manifests[0], fingerprint=fingerprint), tensors=tensors)

    def check(self, weights: Weights) -> None:
        """Raises WeightsCorrupt if `weights`, offered last, arrived damaged at the last generator to receive them."""
        if self._damage:
            raise WeightsCorrupt(self._damage)

    def ask_again(self) -> bool:
        self._asked, self._damage = self._rendezvous.ask_again(), ""
        return True

    def offer(self, weights: Weights) -> None:
        """Has the trainer send these to all generators that are there; returns when they have them, or after the
        deadline. `missing` then names the generators without them."""
        self._weights, self._damage = weights, ""
        self._missing = set(range(self.num_generators))
        self._serve(weights)

    def tend(self) -> None:
        """Has the version offered last sent to generators that lack it and are back."""
        if self._weights is not None and self._missing and time.monotonic() >= self._look_at:
            self._serve(self._weights)

    def send_to(self, number: int, weights: Weights) -> None:
        """Has the trainer send a version to one more reader, number `number`, once it has joined; by the deadline."""
        until = time.monotonic() + self._deadline_seconds
        while self._rendezvous.token(generator_name(number)) is None and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        self._push(weights, [number], until)

    def close(self) -> None:
        """Stops listening; the others then look for a successor."""
        self._rendezvous.close()

    def _layout(self) -> Layout | None:
        """The trainer's; None before it has joined."""
        name = trainer_name(0)
        token = self._rendezvous.token(name)
        if token is None:
            return None
        if self._source is None or self._source[0] != token:
            self._source = (token, Layout.from_json(self._rendezvous.layout(name) or {}))
        return self._source[1]

    def _serve(self, weights: Weights) -> None:
        until = time.monotonic() + self._deadline_seconds
        for _ in range(_ATTEMPTS):
            if asked := self._present():
                self._push(weights, asked, until)
        # Retry slowly while a generator is there that can't take the version: it would take up all our time.
        again = self._deadline_seconds * PATIENCE if self._present() else _LOOK_SECONDS
        self._look_at = time.monotonic() + again

    def _present(self) -> list[int]:
        """Generators that lack the version and, for all we know, would take it."""
        tokens = {g: self._rendezvous.token(generator_name(g)) for g in self._missing}
        return sorted(g for g, token in tokens.items() if token is not None and self._given_up.get(g) != token)

    def _push(self, weights: Weights, asked: list[int], until: float) -> None:
        source = self._layout()
        assert source is not None
        trainers = [trainer_name(rank) for rank in range(source.size)]
        push = self._rendezvous.announce(weights.manifest, [*trainers, *map(generator_name, asked)])
        failpoint("direct.announced")
        answers = self._rendezvous.ready(push, self._patience(until))
        for generator in asked:
            # Before the others go: a generator that finds them gone joins with another token.
            if generator_name(generator) in answers:
                self._given_up.pop(generator, None)
            else:
                self._given_up[generator] = self._rendezvous.token(generator_name(generator))
        members = {name: answers[name]["token"] for name in push.asked if name in answers}
        generators = [g for g in asked if generator_name(g) in members]
        held = {name: answers[name]["held"] for name in trainers if name in answers}
        if (
            len(held) < len(trainers)
            or not generators
            or any(values is None or WeightsId(**values) != push.id for values in held.values())
        ):
            self._call_off(push)
            return
        plan = self._plan(generators)
        if plan is None:
            self._call_off(push)
            return
        if self._members != members:
            # The group is good only for these very processes.
            self._members, self._group = members, str(push.number)
        self._rendezvous.go(push, Go(group=self._group, members=tuple(members), plan=plan.digest))
        failpoint("direct.gone")
        self._conclude(push, plan, generators, until)

    def _call_off(self, push: Push) -> None:
        self._rendezvous.go(push, Go(group="", members=(), plan=""))
        self._rendezvous.over(push, {})

    def _plan(self, generators: list[int]) -> TransferPlan | None:
        """The plan; None if a generator's layout can't be served, which is then given up and named."""
        said = [self._rendezvous.layout(generator_name(g)) or {} for g in generators]
        try:
            return self._plans.plan(self._rendezvous.layout(trainer_name(0)) or {}, said)
        except WeightsMismatch as error:
            print(f"direct: {error}", file=sys.stderr)
            for generator in generators:
                self._given_up[generator] = self._rendezvous.token(generator_name(generator))
            return None

    def _conclude(self, push: Push, plan: TransferPlan, generators: list[int], until: float) -> None:
        """Waits until the members are done, and says who may use what arrived."""
        answers = self._rendezvous.done(push, self._members, self._patience(until, whole=True))
        failpoint("direct.done")
        wrong: dict[str, str] = {}
        for generator in generators:
            name = generator_name(generator)
            if name not in answers:
                wrong[name] = f"{name} did not answer in time"
            else:
                self._damage = "" if answers[name]["wrong"] else self._differing(push, answers[name]["sums"])
                wrong[name] = answers[name]["wrong"] or self._damage
            if wrong[name]:
                print(f"direct: version {push.id.policy_version}: {name}: {wrong[name]}", file=sys.stderr)
        self._rendezvous.over(push, wrong)
        right = {generator_name(g): g for g in generators if not wrong[generator_name(g)]}
        arrived = self._rendezvous.arrived(push, right, self._patience(until))
        failpoint("direct.over")
        self._missing -= {right[name] for name in arrived}
        if len(answers) < len(self._members) or any(one["wrong"] for one in answers.values()):
            self._group, self._members = "", {}
        else:
            self.wire_bytes += int(plan.sent.sum())

    def _differing(self, push: Push, sums: Mapping[str, int]) -> str:
        assert self._weights is not None
        assert self._weights.manifest.fingerprint is not None
        expected = self._weights.manifest.fingerprint
        try:
            expected.verify(
                Fingerprint(tensors={name: as_hex(value) for name, value in sums.items()}),
                f"weights of version {push.id.policy_version} received by direct",
            )
        except WeightsCorrupt as error:
            return str(error)
        return ""

    def _patience(self, until: float, *, whole: bool = False) -> float:
        most = self._deadline_seconds if whole else self._deadline_seconds * PATIENCE
        return max(_SHORTEST_WAIT, min(most, until - time.monotonic()))


def _whole_sums(source: Layout, offered: list[dict[str, Any]]) -> dict[str, int]:
    """The sum of each whole tensor, out of the ranks' sums of their boxes; a box that several ranks hold counts once.

    Raises WeightsCorrupt, naming tensors, if ranks with the same box have different sums.
    """
    sums: dict[str, int] = {}
    differing = []
    for spec, division in zip(source.tensors, source.divisions, strict=True):
        found: dict[Any, int] = {}
        for box, theirs in zip(division, offered, strict=True):
            if box is not None and found.setdefault(box, theirs[spec.name]) != theirs[spec.name]:
                differing.append(spec.name)
        sums[spec.name] = added(found.values())
    if differing:
        raise WeightsCorrupt(f"trainer ranks hold different values of {names_of(dict.fromkeys(differing))}")
    return sums
