"""One process group for the members of a push: bytes from one rank to another.

gloo between tensors in the CPU's memory, NCCL between those on GPUs; nothing else differs.
"""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

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
        if left <= 0:
            raise RuntimeError("the deadline passed while weights were on their way")
        if self._device.type == "cpu":
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
