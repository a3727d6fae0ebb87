"""The messages of a push between its members, each handed from one to the next: gloo on CPUs, NCCL on GPUs.

    trainer rank ══send══► generator 0: receive, pass on ══► generator 1: receive, pass on ══► …

Every member follows the order of `ShardLayout.messages`, so no two of them wait for each other.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from millrace.weights.direct.layout import Message
from millrace.weights.fingerprint import part_of
from storage.failpoints import failpoint

_LOOK_SECONDS = 0.0005
"""Between two looks at work on a GPU, which has no wait with a limit."""


class PushGroup:
    """The members of one push, which connect through addresses in `store`, of this push alone.

    `device` is where each member's tensors are. With gloo a member listens at its own `host` and nowhere else. Raises
    RuntimeError if they do not all come within `seconds`. After any error it can't be used again; the others notice
    when it is dropped.
    """

    def __init__(self, store: Store, host: str, device: torch.device, *, rank: int, size: int, seconds: float) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._group: Any
        if device.type == "cpu":
            # torch's type stubs don't have these, torch's tests use them.
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=seconds)
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        else:
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=seconds)
            with _without_watchdog():
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Sends a contiguous tensor from rank `root` to all others. Raises RuntimeError after the group's seconds."""
        self._group.broadcast(tensor.view(-1).view(torch.uint8), root).wait()

    def destroy(self) -> None:
        """Ends transfers that are under way, here and, once they notice, at the others."""
        if self._device.type == "cuda":
            self._group.abort()

    def send(self, part: torch.Tensor, target: int, tag: int) -> dist.Work:
        """Starts sending a contiguous tensor, which must not change until it is sent."""
        work: dist.Work = self._group.send([part.view(-1).view(torch.uint8)], target, tag)
        return work

    def receive(self, whole: torch.Tensor, message: Message, source: int, tag: int, until: float) -> torch.Tensor:
        """Fills the message's part of a tensor; returns it in one piece. Raises as `wait`."""
        part = part_of(whole, message.box)
        # Columns don't lie in one piece: they are collected first.
        memory = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
        self.wait(self._group.recv([memory.view(-1).view(torch.uint8)], source, tag), until)
        if memory is not part:
            part.copy_(memory)
        return memory

    def wait(self, work: dist.Work, until: float) -> None:
        """Waits for a transfer. Raises RuntimeError after `until` (time.monotonic), or if the other rank is gone."""
        left = until - time.monotonic()
        if left > 0 and self._device.type == "cpu":
            work.wait(timedelta(seconds=left))
            return
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError("the deadline passed while weights were on their way")
            time.sleep(_LOOK_SECONDS)
        work.wait()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Groups made in this block leave errors to `PushGroup.wait`; others would end the process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    previous = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name)
        if previous is not None:
            os.environ[name] = previous


def send_parts(
    group: PushGroup, parts: Mapping[str, torch.Tensor], messages: Sequence[Message], *, target: int, until: float
) -> int:
    """Sends those of `messages` that begin at this rank, out of its contiguous `parts`; returns the bytes.

    Raises RuntimeError if another member is gone, or `until` (time.monotonic) has passed.
    """
    sends, nbytes = [], 0
    for tag, message in enumerate(messages):
        if message.source == group.rank:
            failpoint("direct.hop")
            part = parts[message.spec.name]
            sends.append(group.send(part, target, tag))
            nbytes += part.nbytes
    for send in sends:
        group.wait(send, until)
    return nbytes


def receive_whole(
    group: PushGroup, tensors: Mapping[str, torch.Tensor], messages: Sequence[Message], *, trainers: int, until: float
) -> int:
    """Fills whole tensors from `messages` and hands each message on to the next generator; returns the bytes sent on.

    The first generator of the group, whose rank is `trainers`, gets them from the trainer's ranks. Raises as
    `send_parts`.
    """
    is_first, is_last = group.rank == trainers, group.rank == group.size - 1
    sends, nbytes = [], 0
    for tag, message in enumerate(messages):
        failpoint("direct.hop")
        source = message.source if is_first else group.rank - 1
        part = group.receive(tensors[message.spec.name], message, source, tag, until)
        if not is_last:
            sends.append(group.send(part, group.rank + 1, tag))
            nbytes += part.nbytes
    for send in sends:
        group.wait(send, until)
    return nbytes
