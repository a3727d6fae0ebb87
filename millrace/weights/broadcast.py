"""The transport `broadcast`: sync_weights sends a version to all generators at once, through gloo.

    sync_weights                                            generator g
    offer ─► who is ready? ─► the tensors, one broadcast ─► its thread: receive ─► verify ─► receive buffer 0 or 1
    tend  ─► who is back?  ─► the same, to those            take: whole, or nothing ◄────────────┘

`rendezvous.py` decides who takes part, `process_group.py` moves the tensors. A generator goes on generating while a
version arrives. What `take` returned stays as it is, for the next version goes to the other buffer.

A generator that dies or stands still delays the others once, by half of the deadline at most, and is not waited for
again until it is back. A version that does not get through is tried once more at once; after that the caller decides.
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
from millrace.weights.fingerprint import fingerprint
from millrace.weights.process_group import Group
from millrace.weights.receive_buffer import ReceiveBuffers
from millrace.weights.rendezvous import Go, Push, Rendezvous, RendezvousClient
from millrace.weights.shared_tensors import shapes_of
from storage.failpoints import failpoint

_PATIENCE = 0.25  # of the deadline: for any one thing that another process has to do
_ATTEMPTS = 2
_LOOK_SECONDS = 0.05  # between two looks for generators that are back, and between two tries to find sync_weights
_POLL_SECONDS = 0.01  # between two looks of a generator for a push
_STOP_SECONDS = 5.0  # for the thread to end
_SHORTEST_WAIT = 0.001  # seconds: 0 would be no timeout at all


class BroadcastWriter(WeightsWriter):
    """sync_weights' end, for generators 0 … num_generators − 1. Listens at `host`, at a free port.

    Raises InputError if this machine has no such address.
    """

    def __init__(self, num_generators: int, *, host: str = "127.0.0.1", deadline_seconds: float) -> None:
        self._host = host
        self._deadline_seconds = deadline_seconds
        self._rendezvous = Rendezvous(host)
        self.address: str = self._rendezvous.address
        self._weights: Weights | None = None
        self._num_generators = num_generators
        self._missing = set(range(num_generators))
        # Generators that did not answer, and the token with which they had joined.
        self._given_up: dict[int, str | None] = {}
        self._group: Group | None = None
        self._name = ""
        self._members: dict[int, str] = {}
        self._look_at = 0.0

    @property
    def missing(self) -> set[int]:
        """Generators that do not have the version offered last."""
        return set(self._missing)

    def offer(self, weights: Weights) -> None:
        """Sends these to all generators that are there; returns when they have them, or after the deadline.

        The tensors must not change until the next offer. `missing` then names the generators without them. Raises
        ValueError for a manifest without a fingerprint.
        """
        if weights.manifest.fingerprint is None:
            raise ValueError(f"version {weights.id.policy_version} has no fingerprint to verify it by")
        self._weights = weights
        self._missing = set(range(self._num_generators))
        self._serve(weights)

    def tend(self) -> None:
        """Sends the version offered last to generators that lack it and are back."""
        if self._weights is not None and self._missing and time.monotonic() >= self._look_at:
            self._serve(self._weights)

    def close(self) -> None:
        """Stops listening; generators then look for a successor."""
        self._group = None
        self._rendezvous.close()

    def _serve(self, weights: Weights) -> None:
        until = time.monotonic() + self._deadline_seconds
        for _ in range(_ATTEMPTS):
            if asked := self._present():
                self._push(weights, asked, until)
        # Retry slowly while a generator is there that can't take the version: it would take up all our time.
        again = self._deadline_seconds * _PATIENCE if self._present() else _LOOK_SECONDS
        self._look_at = time.monotonic() + again

    def _present(self) -> list[int]:
        """Generators that lack the version and, for all we know, would take it."""
        tokens = {g: self._rendezvous.joined(g) for g in self._missing}
        return sorted(g for g, token in tokens.items() if token is not None and self._given_up.get(g) != token)

    def _push(self, weights: Weights, asked: list[int], until: float) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in weights.tensors.items()}
        push = self._rendezvous.announce(weights.manifest, shapes_of(tensors), asked)
        members = self._rendezvous.ready(push, self._patience(until))
        # Before the others go: a generator that finds them gone joins with another token.
        for generator in asked:
            if generator in members:
                self._given_up.pop(generator, None)
            else:
                self._given_up[generator] = self._rendezvous.joined(generator)
        if self._group is None or self._members != members:
            # The group is good only for these very processes.
            self._group, self._members, self._name = None, members, str(push.number)
        self._rendezvous.go(push, Go(group=self._name, ranks={g: rank for rank, g in enumerate(members, start=1)}))
        if members:
            self._send(push, tensors, until)
        self._rendezvous.over(push)

    def _send(self, push: Push, tensors: dict[str, torch.Tensor], until: float) -> None:
        """Broadcasts to the members; afterwards `missing` knows which of them verified the version."""
        try:
            if self._group is None:
                size, seconds = len(self._members) + 1, self._patience(until)
                self._group = Group(self._rendezvous.store, self._name, self._host, rank=0, size=size, seconds=seconds)
            self._group.broadcast(tensors, self._deadline_seconds * _PATIENCE, until)
        except RuntimeError as error:
            # Dropping the group cuts the others off, and they notice.
            self._group = None
            print(f"broadcast of version {push.manifest.id.policy_version}: {error}", file=sys.stderr)
            return
        answers = self._rendezvous.done(push, self._members, self._patience(until))
        for generator, wrong in answers.items():
            if wrong:
                print(f"broadcast: generator {generator}: {wrong}", file=sys.stderr)
            else:
                self._missing.discard(generator)
        if answers.keys() != self._members.keys():
            self._group = None

    def _patience(self, until: float) -> float:
        return max(_SHORTEST_WAIT, min(self._deadline_seconds * _PATIENCE, until - time.monotonic()))


class BroadcastReader(WeightsReader):
    """The end of one generator. `find` returns where sync_weights listens (`host:port`), None if not yet known.

    A thread finds sync_weights, again whenever it loses it, and receives into two files beside `path`. An error that
    ends the thread is raised by `take`. No push is waited for longer than `deadline_seconds`.
    """

    def __init__(self, find: Callable[[], str | None], generator: int, path: Path, *, deadline_seconds: float) -> None:
        self._find = find
        self._generator = generator
        self._patience = deadline_seconds * _PATIENCE
        self._buffers = ReceiveBuffers(path)
        self._group: tuple[str, Group] | None = None
        self._error: Exception | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"broadcast reader {generator}", daemon=True)
        self._thread.start()
        # A thread that comes back from torch while the interpreter ends would abort the process.
        atexit.register(self._stop)

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """As in `WeightsReader`. Never waits: neither for a version on its way, nor for sync_weights."""
        if self._error is not None:
            raise self._error
        return self._buffers.take(newer_than)

    def close(self) -> None:
        """Ends the thread and removes the files; what was taken stays usable."""
        self._stop()
        atexit.unregister(self._stop)
        self._buffers.close()

    def _stop(self) -> None:
        self._closed.set()
        # While sync_weights is frozen, the thread can't end.
        self._thread.join(timeout=_STOP_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._follow()
                self._closed.wait(_LOOK_SECONDS)
        except Exception as error:  # noqa: BLE001 — the next `take` raises it
            self._error = error

    def _follow(self) -> None:
        """Takes part in the pushes of sync_weights, if it can be found, until it is gone."""
        address = self._find()
        if address is None:
            return
        try:
            client = RendezvousClient(address, self._generator, self._patience)
        except (OSError, dist.DistError):
            return  # A predecessor's address. The successor will publish its own.
        try:
            while not self._closed.is_set():
                push = client.next_push()
                if push is None:
                    self._closed.wait(_POLL_SECONDS)
                elif self._generator in push.asked:
                    self._receive(client, push)
                elif self._buffers.lacks(push.manifest.id):
                    # sync_weights has given this process up: it was frozen.
                    client.join()
        except dist.DistError:
            pass  # sync_weights is gone; what it last sent stays good.
        finally:
            self._group = None

    def _receive(self, client: RendezvousClient, push: Push) -> None:
        """Takes part in a push; if it goes on without this process, asks to be asked next time."""
        go = client.ready(push, 2 * self._patience)
        if go is None:
            client.join()
            return
        buffer = self._buffers.free()
        tensors = buffer.tensors_for(push.shapes)
        try:
            self._group_of(client, go).broadcast(tensors, self._patience)
        except RuntimeError as error:
            self._group = None
            print(f"broadcast of version {push.manifest.id.policy_version}: {error}", file=sys.stderr)
            # With another token, or sync_weights might count on the group that is gone.
            client.join()
            return
        failpoint("broadcast.before_verify")
        expected = push.manifest.fingerprint
        assert expected is not None
        what = f"weights of version {push.manifest.id.policy_version} received by broadcast"
        wrong = ""
        # The answer comes last: once sync_weights has it, the version must be here to take.
        try:
            expected.verify(fingerprint(tensors), what)
            self._buffers.arrive(Weights(manifest=push.manifest, tensors=tensors, shared=buffer.shared), buffer)
        except WeightsCorrupt as error:
            self._buffers.refuse(error)
            wrong = str(error)
        client.done(push, wrong)

    def _group_of(self, client: RendezvousClient, go: Go) -> Group:
        if self._group is None or self._group[0] != go.group:
            # Drop the old one first: its members may be waiting for this process there.
            self._group = None
            rank, size = go.ranks[self._generator], len(go.ranks) + 1
            group = Group(client.store, go.group, client.host, rank=rank, size=size, seconds=self._patience)
            self._group = (go.group, group)
        return self._group[1]
