"""A trainer rank's end of `direct`: a snapshot of its shards, sent while it trains.

    trainer: publish ─copy─► snapshot ◄── thread: hash ─► offer ─► push: send ─► done
                                ▲                └────────── held ──────────┘
             publish, while the thread holds it: not taken

The ranks' snapshots are of the same version because rank 0 decides, and all take it on its command; a push of a version
that a rank does not hold is called off by sync_weights.
"""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from configs.operation import LIVE
from millrace.weights.base import HandoverSender, Manifest, Weights
from millrace.weights.direct.exchange import send_parts
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.member import Member
from millrace.weights.direct.rendezvous import Offer, Push, RendezvousClient, trainer_name
from millrace.weights.fingerprint import Method, fingerprint, hash_tensor
from storage.failpoints import failpoint

if TYPE_CHECKING:
    from millrace.weights.live.trainer import LiveSender

_SHARE = 0.85
"""Share of a GPU's memory that steps and snapshot may take together: other batches may need more than those so far."""


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
        super().__init__(trainer_name(rank), find, deadline_seconds=deadline_seconds)
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
        def transfer(members: Mapping[str, str], until: float) -> int:
            if push.transport != "direct":
                assert self._live is not None, "this rank has offered that transport"
                return self._live.send(client, push, members, until)
            group = self.join_group(client, push, members)
            parts = {name: tensor.cpu() for name, tensor in self._snapshot.tensors.items()}
            return send_parts(group, parts, self._messages, target=self._layout.size, until=until)

        with self._lock:
            is_able = self._manifest is not None and self._manifest.id == push.manifest.id
            error = self.exchange(client, push, is_able, transfer)
            if error is not None:
                client.done(push, error)


class Snapshot:
    """Rank `rank`'s boxes of `layout` in the generators' dtype, so that a trainer on `device` may change its own.

    A trainer on a GPU casts and copies them without waiting: to the GPU's memory if steps leave enough, else to pinned
    memory. `shared`: vLLM needs the rest of the GPU's memory.
    """

    def __init__(self, layout: ShardLayout, rank: int, device: torch.device, *, shared: bool = False) -> None:
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in layout.tensors}
        on_gpu = device.type == "cuda"
        self.tensors = {
            name: torch.empty([end - begin for begin, end in box], dtype=dtypes[name], pin_memory=on_gpu)
            for name, box in layout.boxes(rank).items()
        }
        """By name. The same dictionary always, with other tensors once they are on the GPU."""
        self._device = device
        self._may_move = on_gpu and not shared
        self._taken: torch.cuda.Event | None = None
        self._num_taken = 0

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies these; on a GPU it only queues that, before whatever the caller does to them next."""
        # The memory that steps need is known after the first step, so from the second snapshot on.
        if self._may_move and self._num_taken > 0:
            self._may_move = False
            self._move_if_there_is_room()
        with torch.no_grad():
            for name, kept in self.tensors.items():
                # Cast where it is: half the bytes to copy.
                kept.copy_(tensors[name].to(kept.dtype), non_blocking=True)
        if self._device.type == "cuda":
            self._taken = torch.cuda.Event()
            self._taken.record(torch.cuda.current_stream(self._device))
        self._num_taken += 1

    def wait(self) -> None:
        """Waits until the copies are made; for the thread that reads them."""
        if self._taken is not None:
            self._taken.synchronize()

    def hashes(self, method: Method) -> dict[str, str]:
        """Returns the hash of each tensor; `sums` are computed on the trainer's device."""
        if method == "xxh3":
            return dict(fingerprint(self.tensors).tensors)
        return {name: hash_tensor(tensor.to(self._device), method) for name, tensor in self.tensors.items()}

    def _move_if_there_is_room(self) -> None:
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        needed = torch.cuda.max_memory_allocated(self._device) + nbytes
        if needed <= _SHARE * torch.cuda.mem_get_info(self._device)[1]:
            for name, tensor in self.tensors.items():
                self.tensors[name] = torch.empty_like(tensor, device=self._device)
