"""A generator's end of `direct`: shards arrive in one of two receive buffers while it generates.

    thread: push ─► free buffer ─► exchange ─► sums ─► sync_weights: right? ─► arrived ─► take: whole, or nothing

A version is never live before every byte of it is here and its sums are those that the trainer's ranks took.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReader
from millrace.weights.direct.control import PATIENCE
from millrace.weights.direct.exchange import Parts
from millrace.weights.direct.layouts import WHOLE
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Push, RendezvousClient, generator_name
from millrace.weights.direct.sums import region_sums
from millrace.weights.receive_buffer import ReceiveBuffers
from millrace.weights.transfer.layout import Layout
from storage.failpoints import failpoint


class DirectReader(Member, WeightsReader):
    """Generator number `generator`. It receives into two files in shared memory, beside `path`.

    An error that ends the thread is raised by `take`.
    """

    def __init__(self, find: Callable[[], str | None], generator: int, path: Path, *, deadline_seconds: float) -> None:
        super().__init__(
            generator_name(generator), find, WHOLE, device=torch.device("cpu"), deadline_seconds=deadline_seconds
        )
        self._buffers = ReceiveBuffers(path)
        self.start()

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """As in `WeightsReader`. Never waits: neither for a version on its way, nor for sync_weights."""
        self.raise_error()
        return self._buffers.take(newer_than)

    def close(self) -> None:
        """Ends the thread and removes the files; what was taken stays usable."""
        self.stop()
        self._buffers.close()

    def joined(self, client: RendezvousClient) -> None:
        """Nothing to say."""

    def left_out(self, client: RendezvousClient, push: Push) -> None:
        if self._buffers.lacks(push.id):
            # sync_weights has given this process up: it was frozen.
            client.join()

    def take_part(self, client: RendezvousClient, push: Push) -> None:
        until = self.until()
        go = self.go(client, push, None)
        if go is None:
            return
        buffer = self._buffers.free()
        tensors: Mapping[str, torch.Tensor] = {}
        layouts: list[Layout] = []

        def parts(source: Layout) -> Parts:
            nonlocal tensors
            layouts.append(source)
            tensors = buffer.tensors_for([(spec.name, spec.dtype, spec.shape) for spec in source.tensors])
            return Parts(tensors, {spec.name: spec.whole for spec in source.tensors})

        if wrong := self.exchange(client, go, parts, until):
            client.done(push, wrong=wrong)
            return
        failpoint("direct.before_sums")
        (source,) = layouts
        whole = {spec.name: spec.whole for spec in source.tensors}
        client.done(push, sums=region_sums(tensors, whole, {spec.name: spec.shape for spec in source.tensors}))
        verdict = client.verdict(push, 2 * self._deadline_seconds * PATIENCE)
        failpoint("direct.before_arrival")
        if verdict == "":
            self._buffers.arrive(Weights(manifest=push.manifest, tensors=tensors, shared=buffer.shared), buffer)
            failpoint("direct.arrived")
            client.arrived(push)
        elif verdict:
            self._buffers.refuse(push.id, WeightsCorrupt(verdict))
        else:
            client.join()
