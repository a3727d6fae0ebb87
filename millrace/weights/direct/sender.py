"""A trainer rank's end of `direct`: a snapshot of its shards, sent while it trains.

    trainer: publish ─copy─► snapshot ◄── thread: hash ─► offer ─► push: send ─► done
                                ▲                └────────── held ──────────┘
             publish, while the thread holds it: not taken

The ranks' snapshots are of the same version because rank 0 decides, and all take it on its command; a push of a version
that a rank does not hold is called off by sync_weights.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import uuid4

import torch

from configs.operation import LIVE
from millrace.weights.base import HandoverSender, Manifest, Weights
from millrace.weights.direct.exchange import PushGroup, send_parts
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Offer, Push, RendezvousClient, trainer_name
from millrace.weights.direct.snapshot import Snapshot
from storage.failpoints import failpoint

if TYPE_CHECKING:
    from millrace.weights.live.trainer import LiveSender


class ShardSender(Member, HandoverSender):
    """Rank `rank` of a trainer on `device`, which has its boxes of `layout`; dtypes are the generators'.

    It sends by `transport`, `direct` or a live one, to generators of `workers` workers each. `shared`: the generator
    uses the same device.
    """

    def __init__(
        self,
        find: Callable[[], str | None],
        layout: ShardLayout,
        rank: int,
        *,
        device: torch.device,
        deadline_seconds: float,
        transport: str = "direct",
        workers: int = 1,
        shared: bool = False,
    ) -> None:
        # Only live transports take tensors from a GPU.
        super().__init__(trainer_name(rank), find, device=torch.device("cpu"), deadline_seconds=deadline_seconds)
        self._layout = layout
        self._messages = layout.messages()
        self._snapshot = Snapshot(layout, rank, device, shared=shared)
        self._live: LiveSender | None = None
        if transport in LIVE:
            # Imported late: it imports vLLM.
            from millrace.weights.live import trainer

            tensors = self._snapshot.tensors
            self._live = trainer.LiveSender(transport, layout, rank, tensors, device=device, workers=workers)
        # Who has it may read the snapshot, or replace it.
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._num_published = 0
        # The client that got the last offer, and the number of the publish that it was.
        self._offered: tuple[RendezvousClient | None, int] = None, 0
        self._resend_requested = False
        self.start()

    @property
    def route(self) -> str:
        """The transport in use, and what keeps it from the configured one, if anything does."""
        if self._live is None:
            return "direct"
        return self._live.transports[0] + (f", because {self._live.limit}" if self._live.limit else "")

    @property
    def busy(self) -> bool:
        """Whether the snapshot is being read, so that `publish` would have to wait."""
        return self._lock.locked()

    def publish(self, weights: Weights) -> None:
        """Takes the snapshot: the elements of this rank's boxes, by name; casts them to the generators' dtypes.

        Waits while a push reads the old one, at most for the deadline. Raises what ended the thread.
        """
        self.raise_error()
        failpoint("direct.before_snapshot")
        with self._lock:
            self._snapshot.take(weights.tensors)
            self._manifest = weights.manifest
            self._num_published += 1
            self._resend_requested = False
        failpoint("direct.after_snapshot")

    def resend_requested(self) -> bool:
        return self._resend_requested

    def close(self) -> None:
        """Ends the thread."""
        self.stop()
        if self._live is not None:
            self._live.close()

    def idle(self, client: RendezvousClient) -> None:
        """Offers the snapshot to each sync_weights once; if that drops the offer, the trainer must publish again."""
        if self._offered == (client, self._num_published):
            self._resend_requested = not client.is_offered()
        elif self._manifest is not None:
            with self._lock:
                manifest, published = self._manifest, self._num_published
                self._snapshot.wait()
                hashes = self._snapshot.hashes("xxh3" if self._live is None else "sums")
            transports = ("direct",) if self._live is None else self._live.transports
            client.offer(Offer(manifest=manifest, layout=self._layout, hashes=hashes, transports=transports))
            self._offered = client, published
            failpoint("direct.offered")

    def take_part(self, client: RendezvousClient, push: Push) -> None:
        def transfer(group: PushGroup, until: float) -> int:
            parts = {name: tensor.cpu() for name, tensor in self._snapshot.tensors.items()}
            return send_parts(group, parts, self._messages, target=self._layout.size, until=until)

        with self._lock:
            is_able = self._manifest is not None and self._manifest.id == push.manifest.id
            if push.transport == "direct":
                error = self.exchange(client, push, is_able, transfer)
            else:
                error = self._send_live(client, push, is_able)
            if error is not None:
                client.done(push, error)

    def _send_live(self, client: RendezvousClient, push: Push, is_able: bool) -> str | None:
        """Sends into the generators' running engines; returns as `exchange`."""
        until = time.monotonic() + self._deadline_seconds
        failpoint("direct.ready")
        members = client.ready(push, self.session if is_able and self._live else "", 2 * self._patience)
        if self.name not in members:
            return None
        assert self._live is not None
        try:
            self.wire_bytes += self._live.send(client, push, members, until)
        except RuntimeError as error:
            # The others find out by it that connections to this rank are gone.
            self.session = uuid4().hex
            print(f"{push.transport}: {self.name}: {error}", file=sys.stderr)
            return str(error)
        return ""
