"""The messages of a push between its members, each handed from one to the next: gloo on CPUs, NCCL on GPUs.

    trainer rank ══send══► generator 0: receive, pass on ══► generator 1: receive, pass on ══► …

Every member follows the order of `ShardLayout.messages`, so nobody waits in a circle. While a message is waited for,
the next ones travel. A message is sent from where it lies, and received where it belongs unless it is a part of a
tensor's columns: those are collected first.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from millrace.weights.direct.layout import Message, volume
from millrace.weights.fingerprint import Region
from storage.failpoints import failpoint

_AHEAD = 4
"""Messages that are expected behind the one that is waited for."""
_LOOK_SECONDS = 0.0005
"""Between two looks at work on a GPU, which has no wait with a limit."""


class Transit:
    """A send or a receive that is under way."""

    def __init__(self, work: dist.Work, device: torch.device) -> None:
        self._work = work
        self._device = device

    def wait(self, until: float) -> None:
        """Returns once the bytes are there, or gone. Raises RuntimeError after `until` (time.monotonic), or if the
        other rank is gone."""
        left = until - time.monotonic()
        if left > 0 and self._device.type == "cpu":
            self._work.wait(timedelta(seconds=left))
            return
        while not self._work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError("the deadline passed while weights were on their way")
            time.sleep(_LOOK_SECONDS)
        self._work.wait()


class Group:
    """The members connect through addresses that they find in `store` under `name`.

    `device` is where each member's tensors are. With gloo a member listens at its own `host` and nowhere else. Raises
    RuntimeError if they do not all come within `seconds`. After any error it can't be used again; dropping it tells the
    others.
    """

    def __init__(
        self, store: Store, name: str, host: str, device: torch.device, *, rank: int, size: int, seconds: float
    ) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        members = PrefixStore(f"group/{name}", store)
        self._group: Any
        if device.type == "cpu":
            # torch's type stubs lack what its own tests use here.
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=seconds)
            self._group = dist.ProcessGroupGloo(members, rank, size, options)
        else:
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=seconds)
            self._group = dist.ProcessGroupNCCL(members, rank, size, nccl)

    def send(self, part: torch.Tensor, target: int, tag: int) -> Transit:
        """Starts sending [n] uint8; they must not change until it is done."""
        return Transit(self._group.send([part], target, tag), self._device)

    def receive(self, part: torch.Tensor, source: int, tag: int) -> Transit:
        """Starts filling [n] uint8."""
        return Transit(self._group.recv([part], source, tag), self._device)


def send_parts(
    group: Group, parts: Mapping[str, torch.Tensor], messages: Sequence[Message], *, target: int, until: float
) -> int:
    """Sends those of `messages` that begin at this rank, out of its contiguous `parts`; returns the bytes.

    Raises RuntimeError if another member is gone, or `until` (time.monotonic) has passed.
    """
    sends = []
    for number, message in enumerate(messages):
        if message.source == group.rank:
            failpoint("direct.hop")
            part = parts[message.spec.name].view(-1)[message.begin : message.end]
            sends.append(group.send(part.view(torch.uint8), target, number))
    for send in sends:
        send.wait(until)
    return sum(message.nbytes for message in messages if message.source == group.rank)


def receive_whole(
    group: Group, tensors: Mapping[str, torch.Tensor], messages: Sequence[Message], *, trainers: int, until: float
) -> int:
    """Fills whole tensors from `messages` and hands each message on to the next generator; returns the bytes sent on.

    The first generator of the group, whose rank is `trainers`, gets them from the trainer's ranks. Raises as
    `send_parts`.
    """
    first, last = group.rank == trainers, group.rank == group.size - 1
    sends: list[Transit] = []
    columns: dict[tuple[str, Region], torch.Tensor] = {}
    coming: deque[tuple[int, Message, torch.Tensor, Transit]] = deque()

    def settle() -> None:
        number, message, memory, receipt = coming.popleft()
        receipt.wait(until)
        if not last:
            sends.append(group.send(memory, group.rank + 1, number))
        key = message.spec.name, message.box
        if key in columns and message.end == volume(message.box):
            whole = tensors[message.spec.name][tuple(slice(begin, end) for begin, end in message.box)]
            whole.copy_(columns.pop(key).view(whole.shape))

    for number, message in enumerate(messages):
        failpoint("direct.hop")
        memory = _place(message, tensors[message.spec.name], columns).view(torch.uint8)
        source = message.source if first else group.rank - 1
        coming.append((number, message, memory, group.receive(memory, source, number)))
        if len(coming) > _AHEAD:
            settle()
    while coming:
        settle()
    for send in sends:
        send.wait(until)
    return 0 if last else sum(message.nbytes for message in messages)


def _place(message: Message, whole: torch.Tensor, columns: dict[tuple[str, Region], torch.Tensor]) -> torch.Tensor:
    """Where the elements of a message belong: in the whole tensor if they lie in one piece there."""
    box, shape = message.box, message.spec.shape
    if all(part == (0, extent) for part, extent in zip(box[1:], shape[1:], strict=True)):
        skipped = box[0][0] * (volume(box) // (box[0][1] - box[0][0])) if box else 0
        return whole.view(-1)[skipped + message.begin : skipped + message.end]
    key = message.spec.name, box
    if key not in columns:
        columns[key] = torch.empty(volume(box), dtype=whole.dtype, device=whole.device)
    return columns[key][message.begin : message.end]
