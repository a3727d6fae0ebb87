"""A generator's end of `direct`: a version arrives in one of two receive buffers while it generates.

    thread: push ─► free buffer ─► receive, hand on ─► right? ─► arrived ─poll─► lent to the caller ─next poll─► free

A version is never live before every byte of it is here and its sums are those that the trainer's ranks took.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReceiver
from millrace.weights.direct.exchange import Group, receive_whole
from millrace.weights.direct.layout import Message, ShardLayout
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Push, RendezvousClient, generator_name
from millrace.weights.shared_tensors import ReceiveBuffer
from storage.failpoints import failpoint


class DirectReceiver(Member, WeightsReceiver):
    """Generator number `generator`. It receives into two files in shared memory, named after `path`.

    An error that ends the thread is raised by `poll`.
    """

    def __init__(self, find: Callable[[], str | None], generator: int, path: Path, *, deadline_seconds: float) -> None:
        super().__init__(generator_name(generator), find, device=torch.device("cpu"), deadline_seconds=deadline_seconds)
        self._buffers = ReceiveBuffers(path)
        self._newest: WeightsId | None = None
        self._order: tuple[Group, ShardLayout, list[Message]] | None = None
        self.start()

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """Never waits: neither for a version on its way, nor for sync_weights."""
        self.raise_error()
        return self._buffers.poll(newer_than)

    def close(self) -> None:
        """Ends the thread and removes the files; received tensors stay usable."""
        self.stop()
        self._buffers.close()

    def left_out(self, client: RendezvousClient, push: Push) -> None:
        if push.id.newer_than(self._newest):
            # sync_weights has given this process up: it was frozen.
            client.join()

    def take_part(self, client: RendezvousClient, push: Push) -> None:
        buffer: ReceiveBuffer
        tensors: Mapping[str, torch.Tensor]

        def transfer(group: Group, until: float) -> int:
            nonlocal buffer, tensors
            layout, messages = self._messages(client, group)
            buffer = self._buffers.free()
            tensors = buffer.tensors_for([(spec.name, spec.dtype, spec.shape) for spec in layout.tensors])
            return receive_whole(group, tensors, messages, trainers=layout.size, until=until)

        wrong = self.exchange(client, push, None, transfer)
        if wrong is None:
            return
        if wrong:
            client.done(push, wrong)
            return
        weights = Weights(manifest=push.manifest, tensors=tensors, shared=buffer.shared)
        failpoint("direct.before_sums")
        try:
            weights.fingerprint.verify(tensors, f"weights of version {push.id.policy_version} received by direct")
        except WeightsCorrupt as damage:
            self._buffers.refuse(push.id, damage)
            client.done(push, str(damage), damaged=True)
            return
        failpoint("direct.before_arrival")
        self._newest = push.id
        self._buffers.arrive(weights, buffer)
        failpoint("direct.arrived")
        client.done(push)

    def _messages(self, client: RendezvousClient, group: Group) -> tuple[ShardLayout, list[Message]]:
        """The trainer's, which stays the same as long as the group does."""
        if self._order is None or self._order[0] is not group:
            layout = client.layout()
            self._order = group, layout, layout.messages()
        return self._order[1:]


class ReceiveBuffers:
    """One file named after `path`, and a second one while the first is lent or waits to be polled.

    Any thread may call the methods.
    """

    def __init__(self, path: Path) -> None:
        self._buffers = [ReceiveBuffer(path.with_name(f"{path.name}-{i}")) for i in (0, 1)]
        self._lock = threading.Lock()
        self._lent: ReceiveBuffer | None = None
        self._arrived: tuple[Weights, ReceiveBuffer] | None = None
        self._refused: WeightsCorrupt | None = None
        self._last_refused: WeightsId | None = None

    def free(self) -> ReceiveBuffer:
        """A buffer that is not in use. If there is none, discards the version that was never polled."""
        with self._lock:
            waiting = None if self._arrived is None else self._arrived[1]
            unused = [buffer for buffer in self._buffers if buffer is not self._lent and buffer is not waiting]
            if not unused:
                self._arrived = None
                assert waiting is not None
                return waiting
            for buffer in unused[1:]:
                # Each is a whole model. The second is seldom needed, and made again when it is.
                buffer.close()
            return unused[0]

    def arrive(self, weights: Weights, buffer: ReceiveBuffer) -> None:
        """These are in this buffer, whole and verified."""
        with self._lock:
            self._arrived = weights, buffer

    def refuse(self, damaged: WeightsId, error: WeightsCorrupt) -> None:
        """This version arrived damaged. The next `poll` raises it, once per version, even if it is sound meanwhile."""
        with self._lock:
            if damaged != self._last_refused:
                self._last_refused, self._refused = damaged, error

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest that arrived, if newer. Ends the loan of the last one. Raises what was refused, once."""
        with self._lock:
            self._lent = None
            refused, self._refused = self._refused, None
            if refused is not None:
                raise refused
            arrived, self._arrived = self._arrived, None
            if arrived is None or not arrived[0].id.newer_than(newer_than):
                return None
            weights, self._lent = arrived
            return weights

    def close(self) -> None:
        """Removes the files. Lent tensors stay usable."""
        for buffer in self._buffers:
            buffer.close()
