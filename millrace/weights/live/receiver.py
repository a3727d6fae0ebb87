"""A generator's end of a live transport: an invitation to a push, which its engine joins when it is ready.

thread: push ─► invitation ─poll─► engine: join, pause, serve the calls, resume ─► done
                    └─ not joined in time: withdrawn, and requested again
"""

import threading
from collections.abc import Callable
from uuid import uuid4

import torch

from millrace.weights.base import Weights, WeightsId, WeightsReceiver
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Push, RendezvousClient, generator_name
from millrace.weights.live.calls import LiveTransfer


class LiveReceiver(Member, WeightsReceiver):
    """Generator number `generator`. Polled weights have no tensors but the push that brings them, `Weights.live`."""

    def __init__(self, find: Callable[[], str | None], generator: int, *, deadline_seconds: float) -> None:
        # It holds no tensors itself.
        super().__init__(generator_name(generator), find, device=torch.device("cpu"), deadline_seconds=deadline_seconds)
        self._lock = threading.Lock()
        self._invitation: LiveTransfer | None = None
        # The version that the engine uses.
        self._held: WeightsId | None = None
        # The client that got the last request, and the number of the push after which.
        self._requested: tuple[RendezvousClient | None, int] = None, 0
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

    def idle(self, client: RendezvousClient) -> None:
        """Requests a newer version, once after each push."""
        if self._requested != (client, client.seen):
            with self._lock:
                held = self._held
            client.request(held)
            self._requested = client, client.seen

    def take_part(self, client: RendezvousClient, push: Push) -> None:
        if not push.live:
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
        # Before `done`, after which sync_weights may announce the next push.
        self.idle(client)
        client.done(push, error)
