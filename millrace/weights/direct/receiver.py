"""A generator's end of `direct`: a version arrives in one of two receive buffers while it generates.

    thread: push ─► free buffer ─► receive, hand on ─► right? ─► arrived ─poll─► lent to the caller ─next poll─► free

A version is never live before every byte of it is here and its hashes are those that the trainer's ranks took.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReceiver
from millrace.weights.direct.exchange import PushGroup, receive_whole
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Push, RendezvousClient, generator_name
from millrace.weights.shared_tensors import ReceiveBuffer
from storage.failpoints import failpoint


class RequestingReceiver(Member, WeightsReceiver):
    """The end of generator number `generator`, which requests a newer version once after each push."""

    def __init__(self, find: Callable[[], str | None], generator: int, *, deadline_seconds: float) -> None:
        super().__init__(generator_name(generator), find, device=torch.device("cpu"), deadline_seconds=deadline_seconds)
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
        buffer: ReceiveBuffer
        tensors: Mapping[str, torch.Tensor]

        def transfer(group: PushGroup, until: float) -> int:
            nonlocal buffer, tensors
            layout = push.layout
            buffer = self._free_buffer()
            tensors = buffer.tensors_for([(spec.name, spec.dtype, spec.shape) for spec in layout.tensors])
            return receive_whole(group, tensors, layout.messages(), trainers=layout.size, until=until)

        error, damage = self.exchange(client, push, True, transfer), ""
        if error is None:
            return
        if not error:
            weights = Weights(manifest=push.manifest, tensors=tensors, shared=buffer.shared)
            failpoint("direct.before_hashes")
            try:
                weights.fingerprint.verify(
                    tensors, f"weights of version {weights.id.policy_version} received by direct"
                )
            except WeightsCorrupt as corrupt:
                error = damage = str(corrupt)
                with self._lock:
                    self._damage = corrupt
            else:
                failpoint("direct.before_arrival")
                with self._lock:
                    self._arrived, self._held = (weights, buffer), weights.id
                failpoint("direct.arrived")
        # Before `done`, after which sync_weights may announce the next push.
        self.idle(client)
        client.done(push, error, damage=damage)

    def _free_buffer(self) -> ReceiveBuffer:
        """The buffer that is not lent. Discards a version in it that was never polled."""
        with self._lock:
            buffer = self._buffers[self._lent is self._buffers[0]]
            if self._arrived is not None and self._arrived[1] is buffer:
                self._arrived = self._held = None
            return buffer
