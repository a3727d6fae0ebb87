"""A trainer rank's shards of a version in the generators' dtype, so that the trainer may change its own.

trainer on the CPU   ─copy─► the CPU's memory
trainer on a GPU     ─cast, copy, without waiting─► the GPU's memory if steps leave enough, else pinned memory
"""

from collections.abc import Mapping

import torch

from millrace.weights.direct.layout import ShardLayout
from millrace.weights.fingerprint import Method, fingerprint, hash_tensor

_SHARE = 0.85
"""Share of a GPU's memory that steps and snapshot may take together: other batches may need more than those so far."""


class Snapshot:
    """Rank `rank`'s boxes of `layout`, of a trainer on `device`; `shared`: vLLM needs the rest of its memory."""

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
