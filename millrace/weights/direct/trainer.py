"""A trainer rank's end of `direct`: a snapshot of its own shards, sent on while it trains.

    trainer: offer ─copy─► snapshot ◄── thread: sums ─► offered ─► push: send ─► done
                              ▲                └───────────── held ─────────────┘
             offer, while the thread holds it: not taken

The ranks' snapshots are of the same version because rank 0 decides, and all take it on its command; a push of a version
that a rank does not hold is called off by sync_weights.
"""

import threading
from collections.abc import Callable

import torch

from millrace.weights.base import Manifest, Weights, WeightsWriter
from millrace.weights.direct.exchange import Parts
from millrace.weights.direct.layouts import FOLLOWS, told
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Push, RendezvousClient, trainer_name
from millrace.weights.direct.sums import region_sums
from millrace.weights.transfer.layout import Layout, Region
from storage.failpoints import failpoint


class ShardSender(Member, WeightsWriter):
    """Rank `rank` of the trainer, which has its boxes of `layout`; dtypes are the generators'.

    The snapshot is on `device`.
    """

    def __init__(
        self,
        find: Callable[[], str | None],
        layout: Layout,
        rank: int,
        *,
        device: torch.device,
        deadline_seconds: float,
    ) -> None:
        super().__init__(
            trainer_name(rank),
            find,
            FOLLOWS if rank else told(layout),
            device=device,
            deadline_seconds=deadline_seconds,
        )
        self._boxes: dict[str, Region] = layout.held(rank)
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
        # How often sync_weights has asked for a version once more: so far, and when the last one was offered.
        self._asked = self._answered = 0
        self.start()

    @property
    def busy(self) -> bool:
        """Whether the snapshot is being read, so that `offer` would have to wait."""
        return self._lock.locked()

    def offer(self, weights: Weights) -> None:
        """Takes the snapshot: the elements of this rank's boxes, by name; casts them to the generators' dtypes.

        Waits while a push reads the old one, at most for the deadline. Raises what ended the thread.
        """
        self.raise_error()
        failpoint("direct.before_snapshot")
        with self._lock, torch.no_grad():
            for name, kept in self._snapshot.items():
                kept.copy_(weights.tensors[name])
            self._manifest = weights.manifest
            self._answered = self._asked
        failpoint("direct.after_snapshot")

    def is_wanted_again(self) -> bool:
        """Whether sync_weights has asked for the version once more, because it arrives damaged."""
        return self._asked != self._answered

    def close(self) -> None:
        """Ends the thread."""
        self.stop()

    def joined(self, client: RendezvousClient) -> None:
        # A successor of sync_weights knows of no offer.
        self._offered = None
        self._asked = self._answered = client.asked_again()
        self.between(client)

    def between(self, client: RendezvousClient) -> None:
        """Offers the snapshot, if sync_weights does not know of it."""
        self._asked = client.asked_again()
        if self._manifest is self._offered:
            return
        with self._lock:
            manifest, answers = self._manifest, self._answered
            assert manifest is not None
            sums = region_sums(self._snapshot, self._boxes, self._shapes)
        client.offer(manifest, sums, answers)
        self._offered = manifest
        failpoint("direct.offered")

    def take_part(self, client: RendezvousClient, push: Push) -> None:
        until = self.until()
        with self._lock:
            held = None if self._manifest is None else self._manifest.id
            go = self.go(client, push, held)
            if go is None:
                return
            wrong = self.exchange(client, go, lambda _: Parts(self._snapshot, self._boxes), until)
            client.done(push, wrong=wrong)
