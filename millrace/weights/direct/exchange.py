"""A rank's part of a transfer plan, carried out over a group: hop by hop, in the plan's order.

    own parts ─pack─► bucket 0 or 1 ═send═►        ═receive═► bucket 0 or 1 ─unpack─► own parts
                                                                    └═send═► the next in the chain

Of two buckets one is on its way while the other is packed or unpacked. A message that is one box, contiguous in the own
parts, takes no bucket: it is sent from there, or received there.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from millrace.weights.direct.group import Group, Transit
from millrace.weights.transfer.layout import Region
from millrace.weights.transfer.messages import Hop, Message, Slice
from storage.failpoints import failpoint

BUCKET_BYTES = 32 << 20
"""The most that travels at once. Two of these are allocated."""


@dataclass
class Parts:
    """What one rank holds of the model: `tensors` has the elements of `boxes`, by name, row-major."""

    tensors: Mapping[str, torch.Tensor]
    boxes: Mapping[str, Region]

    def view(self, piece: Slice) -> torch.Tensor:
        """The elements of a slice, a view."""
        box = self.boxes[piece.tensor]
        index = tuple(
            slice(begin - first, end - first) for (begin, end), (first, _) in zip(piece.region, box, strict=True)
        )
        return self.tensors[piece.tensor][index]

    def as_it_lies(self, message: Message) -> torch.Tensor | None:
        """The message's bytes, [n] uint8, if they lie in one piece here; else None."""
        if len(message.slices) != 1:
            return None
        found = self.view(message.slices[0])
        return _bytes(found) if found.is_contiguous() else None

    def pack(self, message: Message, bucket: torch.Tensor) -> None:
        """Copies the message's slices into a bucket, [n] uint8."""
        for piece in message.slices:
            found = self.view(piece)
            _slot(bucket, piece, found).copy_(found)

    def unpack(self, message: Message, bucket: torch.Tensor) -> None:
        """The inverse of `pack`."""
        for piece in message.slices:
            found = self.view(piece)
            found.copy_(_slot(bucket, piece, found))


class Buckets:
    """Two buckets on a device, allocated once they are needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._both: list[torch.Tensor] = []

    def get(self) -> list[torch.Tensor]:
        """Both, [BUCKET_BYTES] uint8 each."""
        if not self._both:
            self._both = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)]
        return self._both


@dataclass
class _Loan:
    """Memory that a message is in, and what has to be over before another may be there."""

    memory: torch.Tensor
    bucket: torch.Tensor | None
    sends: list[Transit] = field(default_factory=list)


class Exchange:
    """One push, as `rank` takes part in it. Call `run` once."""

    def __init__(self, group: Group, rank: int, parts: Parts, buckets: Buckets, until: float) -> None:
        self._group = group
        self._rank = rank
        self._parts = parts
        self._until = until
        self._free = deque(buckets.get())
        # In the order in which they were filled.
        self._loans: dict[int, _Loan] = {}
        self.sent_bytes = 0
        self.received_bytes = 0

    def run(self, hops: Sequence[Hop]) -> None:
        """Returns when all that this rank has to get is in its parts, and all it has to send is gone.

        Raises RuntimeError if another rank is gone, or `until` (time.monotonic) has passed.
        """
        relayed = {hop.message.number for hop in hops if hop.source == self._rank}
        coming: dict[int, Transit] = {}
        for at, hop in enumerate(hops):
            failpoint("direct.hop")
            message = hop.message
            if hop.source == self._rank:
                self._send(hop)
                continue
            if message.number not in coming:
                coming[message.number] = self._receive(hop)
            following = hops[at + 1] if at + 1 < len(hops) else None
            if following is not None and following.target == self._rank and self._has_room(following.message):
                # The next one travels while this one is unpacked.
                coming[following.message.number] = self._receive(following)
            coming.pop(message.number).wait(self._until)
            self._arrived(message, keep=message.number in relayed)
        for number in list(self._loans):
            self._settle(number)

    def _send(self, hop: Hop) -> None:
        message = hop.message
        loan = self._loans.get(message.number)
        if loan is None:
            lying = self._parts.as_it_lies(message)
            if lying is None:
                bucket = self._bucket()
                loan = _Loan(bucket[: message.nbytes], bucket)
                self._parts.pack(message, bucket)
            else:
                loan = _Loan(lying, None)
            self._loans[message.number] = loan
        loan.sends.append(self._group.send(loan.memory, hop.target, message.number))
        self.sent_bytes += message.nbytes

    def _receive(self, hop: Hop) -> Transit:
        message = hop.message
        lying = self._parts.as_it_lies(message)
        if lying is None:
            bucket = self._bucket()
            loan = _Loan(bucket[: message.nbytes], bucket)
        else:
            loan = _Loan(lying, None)
        self._loans[message.number] = loan
        self.received_bytes += message.nbytes
        return self._group.receive(loan.memory, hop.source, message.number)

    def _arrived(self, message: Message, *, keep: bool) -> None:
        loan = self._loans[message.number]
        if loan.bucket is not None:
            self._parts.unpack(message, loan.bucket)
        if not keep:
            self._settle(message.number)

    def _has_room(self, message: Message) -> bool:
        return bool(self._free) or self._parts.as_it_lies(message) is not None

    def _bucket(self) -> torch.Tensor:
        """A free bucket; waits for the oldest send out of one."""
        while not self._free:
            number = next(number for number, loan in self._loans.items() if loan.bucket is not None and loan.sends)
            self._settle(number)
        return self._free.popleft()

    def _settle(self, number: int) -> None:
        """Ends a message's stay here, once its sends are over."""
        loan = self._loans.pop(number)
        for transit in loan.sends:
            transit.wait(self._until)
        if loan.bucket is not None:
            self._free.append(loan.bucket)


def _slot(bucket: torch.Tensor, piece: Slice, like: torch.Tensor) -> torch.Tensor:
    """Where a slice is in a bucket, as a tensor of `like`'s dtype and shape."""
    return bucket[piece.offset : piece.offset + like.nbytes].view(like.dtype).view(like.shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
