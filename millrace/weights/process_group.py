"""One process group of gloo: the tensors of a version go from rank 0 to all others at once.

rank 0  │ tensor │ ten- │ -sor │ small, small, small │ …  ──broadcast, chunk after chunk──►  rank 1 … N
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from storage.failpoints import failpoint

_MOST = 64 << 20  # bytes per chunk: how much may have to move before a stopped member is noticed
_SMALL = 1 << 20  # bytes: below, a call costs more than a copy; measured 0.25 ms a call beside 1.2 GB/s to each of two
_GATHERED = 4 << 20  # bytes of small tensors that go together


class Group:
    """The members connect through addresses they find in `store` under `name`.

    Each listens at its own `host` and nowhere else. Raises RuntimeError if they do not all come within `seconds`.
    After any error it can't be used again; dropping it tells the others.
    """

    def __init__(self, store: Store, name: str, host: str, *, rank: int, size: int, seconds: float) -> None:
        # torch's type stubs lack what its own tests use here.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=seconds)
        self._gloo = dist.ProcessGroupGloo(PrefixStore(f"group/{name}", store), rank, size, options)
        self._rank = rank

    def broadcast(self, tensors: Mapping[str, torch.Tensor], seconds: float, until: float = math.inf) -> None:
        """Sends these from rank 0, fills them elsewhere: same dtypes, shapes and order everywhere, contiguous.

        Raises RuntimeError if a member is gone, if one chunk takes longer than `seconds`, or if all of them take longer
        than `until` (on the clock of time.monotonic).
        """
        for chunk in _chunks(tensors.values()):
            failpoint("broadcast.chunk")
            left = min(seconds, until - time.monotonic())
            if left <= 0:
                raise RuntimeError("the deadline passed while tensors were on their way")
            whole = chunk[0] if len(chunk) == 1 else torch.cat(chunk)
            self._gloo.broadcast(whole, 0, timedelta(seconds=left)).wait()  # type: ignore[attr-defined]
            if self._rank and len(chunk) > 1:
                for target, arrived in zip(chunk, torch.split(whole, [piece.numel() for piece in chunk]), strict=True):
                    target.copy_(arrived)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors' bytes in pieces that travel together: [n] uint8 views, the same cuts for the same shapes."""
    gathered: list[torch.Tensor] = []
    for tensor in tensors:
        for piece in torch.split(tensor.detach().reshape(-1).view(torch.uint8), _MOST):
            if piece.numel() >= _SMALL:
                yield [piece]
                continue
            gathered.append(piece)
            if sum(small.numel() for small in gathered) >= _GATHERED:
                yield gathered
                gathered = []
    if gathered:
        yield gathered
