"""A trainer rank's end of `direct`: a snapshot of its own shards, sent on while it trains.

    trainer: publish ─copy─► snapshot ◄── thread: sums ─► offered ─► push: send ─► done
                                ▲                └───────────── held ─────────────┘
             publish, while the thread holds it: not taken

The ranks' snapshots are of the same version because rank 0 decides, and all take it on its command; a push of a version
that a rank does not hold is called off by sync_weights.
"""

import threading
from collections.abc import Callable

import torch

from millrace.weights.base import HandoverSender, Manifest, Weights
from millrace.weights.direct.exchange import Group, send_parts
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Push, RendezvousClient, trainer_name
from millrace.weights.fingerprint import region_sums
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
        super().__init__(
            trainer_name(rank),
            find,
            device=device,
            deadline_seconds=deadline_seconds,
            layout=None if rank else layout,
        )
        self._messages = layout.messages()
        self._target = layout.size
        self._boxes = layout.boxes(rank)
        self._shapes = {spec.name: spec.shape for spec in layout.tensors}
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in layout.tensors}
        self._snapshot = {
            name: torch.empty([end - begin for begin, end in box], dtype=dtypes[name], device=device)
            for name, box in self._boxes.items()
        }
        # Who has it may read the snapshot, or replace it.
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._offered: Manifest | None = None
        # How often sync_weights has asked for a version once more: so far, and when the last one was published.
        self._resends = self._resent = 0
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
            self._resent = self._resends
        failpoint("direct.after_snapshot")

    def resend_requested(self) -> bool:
        return self._resends != self._resent

    def close(self) -> None:
        """Ends the thread."""
        self.stop()

    def joined(self, client: RendezvousClient) -> None:
        # A successor of sync_weights knows of no offer.
        self._offered = None
        self._resends = self._resent = client.resends()
        self.between(client)

    def between(self, client: RendezvousClient) -> None:
        """Offers the snapshot, if sync_weights does not know of it."""
        self._resends = client.resends()
        if self._manifest is self._offered:
            return
        with self._lock:
            manifest, resent = self._manifest, self._resent
            assert manifest is not None
            sums = region_sums(self._snapshot, self._boxes, self._shapes)
        client.offer(manifest, sums, resent)
        self._offered = manifest
        failpoint("direct.offered")

    def take_part(self, client: RendezvousClient, push: Push) -> None:
        def transfer(group: Group, until: float) -> int:
            return send_parts(group, self._snapshot, self._messages, target=self._target, until=until)

        with self._lock:
            held = None if self._manifest is None else self._manifest.id
            wrong = self.exchange(client, push, held, transfer)
            if wrong is not None:
                client.done(push, wrong)
