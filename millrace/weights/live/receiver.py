"""A generator's end of a live transport: an invitation to a push, which its engine joins when it is ready.

thread: push ─► invitation ─poll─► engine: join, pause, serve the calls, resume ─► done
                    └─ not joined in time: withdrawn, and requested again
"""

from collections.abc import Callable
from uuid import uuid4

from millrace.weights.base import Weights, WeightsId
from millrace.weights.direct.receiver import RequestingReceiver
from millrace.weights.direct.rendezvous import Push, RendezvousClient
from millrace.weights.live.calls import LiveTransfer


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
        # Before `done`, after which sync_weights may announce the next push.
        self.idle(client)
        client.done(push, error)
