"""A generator's end of pushes: by `direct` into one of two receive buffers, by live transports into its engine.

direct   thread: push ─► free buffer ─► receive, hand on ─► right? ─► arrived ─poll─► lent ─next poll─► free
live     thread: push ─► invitation ─poll─► engine: join, pause, serve the calls, resume ─► done
                             └─ not joined in time: withdrawn, and requested again

By `direct`, a version is never live before every byte of it is here and its hashes are those that the trainer's ranks
took.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from uuid import uuid4

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReceiver
from millrace.weights.direct.exchange import receive_whole
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Push, RendezvousClient, generator_name
from millrace.weights.live.calls import LiveTransfer
from millrace.weights.shared_tensors import ReceiveBuffer
from storage.failpoints import failpoint


class RequestingReceiver(Member, WeightsReceiver):
    """The end of generator number `generator`, which requests a newer version once after each push."""

    def __init__(self, find: Callable[[], str | None], generator: int, *, deadline_seconds: float) -> None:
        super().__init__(generator_name(generator), find, deadline_seconds=deadline_seconds)
        # For the attributes that `poll` and the thread share.
        self._lock = threading.Lock()
        # The version that needs no request.
        self._held: WeightsId | None = None
        # The client that got the last request, and the number of the push after which.
        self._requested: tuple[RendezvousClient | None, int] = None, 0

    def idle(self, client: RendezvousClient) -> None:
        """Requests a newer version, once after each push."""
        if self._requested != (client, client.seen):
            with self._lock:
                held = self._held
            client.request(held)
            self._requested = client, client.seen

    def answer(self, client: RendezvousClient, push: Push, error: str, damage: str = "") -> None:
        """Answers that its part is done, or what went wrong; `damage`: the received tensors that don't match."""
        # First, because after the answer sync_weights may announce the next push.
        self.idle(client)
        client.done(push, error, damage=damage)


class DirectReceiver(RequestingReceiver):
    """Generator number `generator`. It receives into files in shared memory, named after `path`.

    The second file is made once a version arrives while the first is lent. An error that ends the thread is raised by
    `poll`.
    """

    def __init__(self, find: Callable[[], str | None], generator: int, path: Path, *, deadline_seconds: float) -> None:
        super().__init__(find, generator, deadline_seconds=deadline_seconds)
        self._buffers = [ReceiveBuffer(path.with_name(f"{path.name}-{i}")) for i in (0, 1)]
        self._lent: ReceiveBuffer | None = None
        self._arrived: tuple[Weights, ReceiveBuffer] | None = None
        self._damage: WeightsCorrupt | None = None
        self.start()

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """Never waits: neither for a version on its way, nor for sync_weights. Raises damage once per push."""
        self.raise_error()
        with self._lock:
            self._lent = None
            damage, self._damage = self._damage, None
            if damage is not None:
                raise damage
            arrived, self._arrived = self._arrived, None
            if arrived is None or not arrived[0].id.newer_than(newer_than):
                return None
            weights, self._lent = arrived
            return weights

    def close(self) -> None:
        """Ends the thread and removes the files; received tensors stay usable."""
        self.stop()
        for buffer in self._buffers:
            buffer.close()

    def take_part(self, client: RendezvousClient, push: Push) -> None:
        damage = ""
        try:
            error = self.exchange(client, push, True, partial(self._receive, client, push))
        except WeightsCorrupt as corrupt:
            error = damage = str(corrupt)
            with self._lock:
                self._damage = corrupt
        if error is not None:
            self.answer(client, push, error, damage)

    def _receive(self, client: RendezvousClient, push: Push, members: Mapping[str, str], until: float) -> int:
        """Receives and hands on a version; returns the bytes sent. Raises WeightsCorrupt if it arrived damaged."""
        layout, group = push.layout, self.join_group(client, push, members)
        buffer = self._free_buffer()
        tensors = buffer.tensors_for([(spec.name, spec.dtype, spec.shape) for spec in layout.tensors])
        nbytes = receive_whole(group, tensors, layout.messages(), trainers=layout.size, until=until)
        weights = Weights(manifest=push.manifest, tensors=tensors, shared=buffer.shared)
        failpoint("direct.before_hashes")
        weights.fingerprint.verify(tensors, f"weights of version {weights.id.policy_version} received by direct")
        failpoint("direct.before_arrival")
        with self._lock:
            self._arrived, self._held = (weights, buffer), weights.id
        failpoint("direct.arrived")
        return nbytes

    def _free_buffer(self) -> ReceiveBuffer:
        """The buffer that is not lent. Discards a version in it that was never polled."""
        with self._lock:
            buffer = self._buffers[self._lent is self._buffers[0]]
            if self._arrived is not None and self._arrived[1] is buffer:
                self._arrived = self._held = None
            return buffer


class LiveReceiver(RequestingReceiver):
    """Generator number `generator`. Polled weights have no tensors but the push that brings them, `Weights.live`."""

    def __init__(self, find: Callable[[], str | None], generator: int, *, deadline_seconds: float) -> None:
        super().__init__(find, generator, deadline_seconds=deadline_seconds)
        self._invitation: LiveTransfer | None = None
        self.start()

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """Returns a newer version that can be joined now. Raises the error that ended the thread, if any."""
        self.raise_error()
        with self._lock:
            self._held = newer_than
            invitation, self._invitation = self._invitation, None
        if invitation is None:
            return None
        manifest = invitation.push.manifest
        if not manifest.id.newer_than(newer_than):
            # The store was faster.
            invitation.withdraw()
            return None
        return Weights(manifest=manifest, tensors={}, live=invitation)

    def close(self) -> None:
        """Ends the thread."""
        self.stop()

    def take_part(self, client: RendezvousClient, push: Push) -> None:
        if push.transport == "direct":
            return
        transfer = LiveTransfer(
            client, push, self.name, self.session, patience=2 * self._patience, seconds=self._deadline_seconds
        )
        with self._lock:
            self._invitation = transfer
        transfer.wait()
        error = transfer.error
        with self._lock:
            self._invitation = None
            if error == "":
                self._held = push.manifest.id
        if error is None:
            return
        if error:
            self.session = uuid4().hex
        self.answer(client, push, error)
