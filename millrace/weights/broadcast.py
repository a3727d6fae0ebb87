"""The transport `broadcast`: sync_weights sends a version to all generators at once, through gloo.

    sync_weights                                            generator g
    offer ─► who is ready? ─► the tensors, one broadcast ─► its thread: receive ─► verify ─► landing 0 or 1
    tend  ─► who is back?  ─► the same, to those            take: whole, or nothing ◄────────────┘

What the two say to each other is in `gathering.py`, how the tensors travel in `collective.py`. A generator goes on
generating while a version arrives; what `take` gave out stays as it is, for the next one goes to the other landing.

Who dies or stands still delays the others once, by half of the deadline at most, and is not waited for again until it
is back. A version that does not get through is tried once more at once; then it is the caller's turn.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReader, WeightsWriter
from millrace.weights.collective import Group
from millrace.weights.fingerprint import fingerprint, names_of
from millrace.weights.gathering import Board, Go, Push, Seat
from millrace.weights.landings import Landings
from millrace.weights.shared import shapes_of
from storage.failpoints import failpoint

_PATIENCE = 0.25  # of the deadline: for any one thing that another process has to do
_ATTEMPTS = 2
_LOOK_SECONDS = 0.05  # between two looks who is back, and between two tries to find sync_weights
_POLL_SECONDS = 0.01  # between two looks of a generator at the board
_GOODBYE_SECONDS = 5.0  # for the thread to end
_SHORTEST_WAIT = 0.001  # seconds: 0 would be no timeout at all


class BroadcastWriter(WeightsWriter):
    """sync_weights' end, for generators 0 … num_generators − 1. Listens at `host`, at a free port.

    Raises InputError if this machine has no such address.
    """

    def __init__(self, num_generators: int, *, host: str = "127.0.0.1", deadline_seconds: float) -> None:
        self._host = host
        self._deadline_seconds = deadline_seconds
        self._board = Board(host)
        self._weights: Weights | None = None
        self._num_generators = num_generators
        self._missing = set(range(num_generators))
        # Those that did not answer, and the token with which they had said hello.
        self._given_up: dict[int, str | None] = {}
        self._group: Group | None = None
        self._name = ""
        self._members: dict[int, str] = {}
        self._look_at = 0.0

    @property
    def address(self) -> str:
        """`host:port`, for the generators' `find`."""
        return self._board.address

    @property
    def missing(self) -> set[int]:
        """Generators that do not have the version offered last."""
        return set(self._missing)

    def offer(self, weights: Weights) -> None:
        """Sends these to all generators that are there; returns when they have them, or after the deadline.

        The tensors must stay as they are until the next offer. `missing` says who does not have them. Raises ValueError
        for a manifest without a fingerprint.
        """
        if weights.manifest.fingerprint is None:
            raise ValueError(f"version {weights.id.policy_version} has no fingerprint to verify it by")
        self._weights = weights
        self._missing = set(range(self._num_generators))
        self._serve(weights)

    def tend(self) -> None:
        """Sends the version offered last to those that lack it and are back."""
        if self._weights is not None and self._missing and time.monotonic() >= self._look_at:
            self._serve(self._weights)

    def close(self) -> None:
        """Stops listening; generators look for a successor then."""
        self._group = None
        self._board.close()

    def _serve(self, weights: Weights) -> None:
        until = time.monotonic() + self._deadline_seconds
        for _ in range(_ATTEMPTS):
            if asked := self._present():
                self._push(weights, asked, until)
        # Who is there and can't take it would have us do nothing else.
        again = self._deadline_seconds * _PATIENCE if self._present() else _LOOK_SECONDS
        self._look_at = time.monotonic() + again

    def _present(self) -> list[int]:
        """Generators that lack the version and, for all we know, would take it."""
        hellos = {g: self._board.hello(g) for g in self._missing}
        return sorted(g for g, token in hellos.items() if token is not None and self._given_up.get(g) != token)

    def _push(self, weights: Weights, asked: list[int], until: float) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in weights.tensors.items()}
        push = self._board.announce(weights.manifest, shapes_of(tensors), asked)
        members = self._board.ready(push, self._patience(until))
        # Before the others go: whoever finds them gone says hello with another token.
        for generator in asked:
            if generator in members:
                self._given_up.pop(generator, None)
            else:
                self._given_up[generator] = self._board.hello(generator)
        name = self._group_name(push, members)
        self._board.go(push, Go(group=name, ranks={g: rank for rank, g in enumerate(members, start=1)}))
        if members:
            self._send(push, tensors, until)
        self._board.over(push)

    def _send(self, push: Push, tensors: dict[str, torch.Tensor], until: float) -> None:
        """To the members, as one; afterwards `missing` knows who verified them."""
        try:
            if self._group is None:
                self._group = self._form(until)
            self._group.broadcast(tensors, self._deadline_seconds * _PATIENCE, until)
        except RuntimeError as error:
            # The others are cut off with it, and notice.
            self._group = None
            print(f"broadcast of version {push.manifest.id.policy_version}: {error}", file=sys.stderr)
            return
        answers = self._board.done(push, self._members, self._patience(until))
        for generator, wrong in answers.items():
            if wrong:
                print(f"broadcast: generator {generator}: {wrong}", file=sys.stderr)
            else:
                self._missing.discard(generator)
        if answers.keys() != self._members.keys():
            self._group = None

    def _group_name(self, push: Push, members: dict[int, str]) -> str:
        """The group's that is there if it is of these very processes; else a new one's."""
        if self._group is None or self._members != members:
            self._group = None
            self._members = members
            self._name = str(push.number)
        return self._name

    def _form(self, until: float) -> Group:
        size = len(self._members) + 1
        return Group(self._board.store, self._name, self._host, rank=0, size=size, seconds=self._patience(until))

    def _patience(self, until: float) -> float:
        return max(_SHORTEST_WAIT, min(self._deadline_seconds * _PATIENCE, until - time.monotonic()))


class BroadcastReader(WeightsReader):
    """The end of one generator. `find` says where sync_weights listens (`host:port`, None: not yet known).

    A thread of its own finds sync_weights, again whenever it loses it, and receives into two files beside
    `landing_path`. What it could not deal with, `take` raises.
    """

    def __init__(
        self, find: Callable[[], str | None], generator: int, landing_path: Path, *, deadline_seconds: float
    ) -> None:
        self._find = find
        self._generator = generator
        self._patience = deadline_seconds * _PATIENCE
        self._landings = Landings(landing_path)
        self._group: tuple[str, Group] | None = None
        self._fault: Exception | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"broadcast reader {generator}", daemon=True)
        self._thread.start()
        # A thread that comes back from torch while the interpreter ends would abort the process.
        atexit.register(self._stop)

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """As `WeightsReader` says; it never waits: not for a version on its way, nor for sync_weights."""
        if self._fault is not None:
            raise self._fault
        return self._landings.take(newer_than)

    def close(self) -> None:
        """Ends the thread and removes the files; what was taken stays usable."""
        self._stop()
        atexit.unregister(self._stop)
        self._landings.close()

    def _stop(self) -> None:
        self._closed.set()
        # With sync_weights frozen, it does not end before that one does.
        self._thread.join(timeout=_GOODBYE_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._attend()
                self._closed.wait(_LOOK_SECONDS)
        except Exception as error:  # noqa: BLE001 — the next `take` raises it
            self._fault = error

    def _attend(self) -> None:
        """Follows sync_weights, if it can be found, until it is gone."""
        address = self._find()
        if address is None:
            return
        try:
            seat = Seat(address, self._generator, self._patience)
        except (OSError, dist.DistError):
            return  # A predecessor's address. The successor says its own in time.
        try:
            while not self._closed.is_set():
                push = seat.news()
                if push is None:
                    self._closed.wait(_POLL_SECONDS)
                elif self._generator in push.asked:
                    self._answer(seat, push)
                elif self._landings.lacks(push.manifest.id):
                    # Given up: we were frozen.
                    seat.hello()
        except dist.DistError:
            pass  # sync_weights is gone; what it last sent stays good.
        finally:
            self._group = None

    def _answer(self, seat: Seat, push: Push) -> None:
        """Takes part in a push; if it went on without us, asks to be asked next time."""
        go = seat.ready(push, 2 * self._patience)
        if go is None:
            seat.hello()
            return
        landing = self._landings.free()
        tensors = landing.tensors_for(push.shapes)
        try:
            self._group_of(seat, go).broadcast(tensors, self._patience)
        except RuntimeError as error:
            self._group = None
            print(f"broadcast of version {push.manifest.id.policy_version}: {error}", file=sys.stderr)
            # With another token, or sync_weights might count on the group that is gone.
            seat.hello()
            return
        failpoint("broadcast.before_verify")
        weights = Weights(manifest=push.manifest, tensors=tensors, shared=landing.shared)
        refused = _verify(weights)
        # Before the answer: who was told that it is done may look.
        if refused is None:
            self._landings.arrive(weights, landing)
        else:
            self._landings.refuse(refused)
        seat.done(push, "" if refused is None else str(refused))

    def _group_of(self, seat: Seat, go: Go) -> Group:
        if self._group is None or self._group[0] != go.group:
            # Let go of the old one first: its members may be waiting for us there.
            self._group = None
            group = Group(
                seat.store,
                go.group,
                seat.host,
                rank=go.ranks[self._generator],
                size=len(go.ranks) + 1,
                seconds=self._patience,
            )
            self._group = (go.group, group)
        return self._group[1]


def _verify(weights: Weights) -> WeightsCorrupt | None:
    expected = weights.manifest.fingerprint
    assert expected is not None
    if names := expected.differs(fingerprint(weights.tensors)):
        return WeightsCorrupt(
            f"version {weights.id.policy_version} arrived damaged by broadcast: {names_of(names)} "
            "differ from what sync_weights sent"
        )
    return None
