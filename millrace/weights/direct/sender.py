"""A trainer rank's end of `direct`: a snapshot of its shards, sent while it trains.

    trainer: publish ─copy─► snapshot ◄── thread: hash ─► offer ─► push: send ─► done
                                ▲                └────────── held ──────────┘
             publish, while the thread holds it: not taken

The ranks' snapshots are of the same version because rank 0 decides, and all take it on its command; a push of a version
that a rank does not hold is called off by sync_weights.
"""

import threading
from collections.abc import Callable

import torch

from millrace.weights.base import HandoverSender, Manifest, Weights
from millrace.weights.direct.exchange import PushGroup, send_parts
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Offer, Push, RendezvousClient, trainer_name
from millrace.weights.fingerprint import fingerprint
from storage.failpoints import failpoint


class ShardSender(Member, HandoverSender):
    """Rank `rank` of the trainer, which has its boxes of `layout`; dtypes are the generators'.

    The snapshot is on `device`.
    """

    def __init__(
        self,
        find: Callable[[], str | None],
        layout: ShardLayout,
        rank: int,
        *,
        device: torch.device,
        deadline_seconds: float,
    ) -> None:
        super().__init__(trainer_name(rank), find, device=device, deadline_seconds=deadline_seconds)
        self._layout = layout
        self._messages = layout.messages()
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in layout.tensors}
        self._snapshot = {
            name: torch.empty([end - begin for begin, end in box], dtype=dtypes[name], device=device)
            for name, box in layout.boxes(rank).items()
        }
        # Who has it may read the snapshot, or replace it.
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._num_published = 0
        # The client that got the last offer, and the number of the publish that it was.
        self._offered: tuple[RendezvousClient | None, int] = None, 0
        self._resend_requested = False
        self.start()

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
        with self._lock, torch.no_grad():
            for name, kept in self._snapshot.items():
                kept.copy_(weights.tensors[name])
            self._manifest = weights.manifest
            self._num_published += 1
            self._resend_requested = False
        failpoint("direct.after_snapshot")

    def resend_requested(self) -> bool:
        return self._resend_requested

    def close(self) -> None:
        """Ends the thread."""
        self.stop()

    def idle(self, client: RendezvousClient) -> None:
        """Offers the snapshot to each sync_weights once; if that drops the offer, the trainer must publish again."""
        if self._offered == (client, self._num_published):
            self._resend_requested = not client.is_offered()
        elif self._manifest is not None:
            with self._lock:
                manifest, published = self._manifest, self._num_published
                hashes = fingerprint(self._snapshot).tensors
            client.offer(Offer(manifest=manifest, layout=self._layout, hashes=hashes))
            self._offered = client, published
            failpoint("direct.offered")

    def take_part(self, client: RendezvousClient, push: Push) -> None:
        def transfer(group: PushGroup, until: float) -> int:
            return send_parts(group, self._snapshot, self._messages, target=self._layout.size, until=until)

        with self._lock:
            is_able = self._manifest is not None and self._manifest.id == push.manifest.id
            error = self.exchange(client, push, is_able, transfer)
            if error is not None:
                client.done(push, error)
