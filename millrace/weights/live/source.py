"""The trainer's snapshot as vLLM's trainer engines read it: whole tensors one by one, or each rank's own shards.

SnapshotSource   shards of all ranks ──group of the ranks──► rank 0: a whole tensor ─► nccl, gloo, ipc
ShardSource      a rank's shard ──────────────────────────────────────────────────► nccl_m2n, on every rank
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.m2n_common import (
    MAX_SOURCE_SHARDS,
    REPLICATE,
    M2NMesh,
    M2NParamMeta,
    check_transferable,
    import_m2n,
)
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

from millrace.weights.direct.exchange import PushGroup
from millrace.weights.direct.layout import Message, ShardLayout
from millrace.weights.fingerprint import part_of
from storage.failpoints import failpoint

_M2N_NCCL = (2, 30, 5)
"""The oldest NCCL for nccl-extensions. The package imports with older ones, and fails in the first transfer."""


class SnapshotSource(WeightSource):
    """Rank 0 yields whole tensors on `device`; the others send it their parts and yield those.

    Several ranks have a `group`; set `until` (time.monotonic) before each iteration. Rank 0 never holds more than the
    tensors that vLLM keeps for a packed buffer. Raises RuntimeError once `cancelled`.
    """

    def __init__(
        self,
        layout: ShardLayout,
        rank: int,
        snapshot: Mapping[str, torch.Tensor],
        device: torch.device,
        group: PushGroup | None,
    ) -> None:
        self.group = group
        self.until = 0.0
        self.cancelled = False
        self.nbytes = 0
        """Bytes that this rank has yielded or sent to rank 0."""
        self._layout, self._rank, self._snapshot, self._device = layout, rank, snapshot, device
        self._messages: dict[str, list[tuple[int, Message]]] = defaultdict(list)
        for tag, message in enumerate(layout.messages()):
            self._messages[message.spec.name].append((tag, message))

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and shapes of whole tensors."""
        return [ParamMeta(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in self._layout.tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata():
            if self.cancelled:
                raise RuntimeError("the push was aborted")
            failpoint("live.tensor")
            tensor = self._gather(meta) if self._rank == 0 else self._send(meta.name)
            self.nbytes += tensor.nbytes
            yield meta.name, tensor

    def _gather(self, meta: ParamMeta) -> torch.Tensor:
        if self._layout.size == 1:
            return self._snapshot[meta.name].to(self._device)
        whole = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
        for tag, message in self._messages[meta.name]:
            if message.source == 0:
                part_of(whole, message.box).copy_(self._snapshot[meta.name])
            else:
                assert self.group is not None
                self.group.receive(whole, message, message.source, tag, self.until)
        return whole

    def _send(self, name: str) -> torch.Tensor:
        assert self.group is not None
        sent = torch.empty(0, device=self._device)
        for tag, message in self._messages[name]:
            if message.source == self._rank:
                sent = self._snapshot[name].to(self._device)
                self.group.wait(self.group.send(sent, 0, tag), self.until)
        return sent


class ShardSource(M2NWeightSource):
    """Each rank yields its own shards on `device`; only for a layout without an `m2n_limit`."""

    def __init__(self, layout: ShardLayout, snapshot: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.until = 0.0
        self.cancelled = False
        self.nbytes = 0
        """Bytes that this rank has sent."""
        self._layout, self._snapshot, self._device = layout, snapshot, device

    def mesh(self) -> M2NMesh:
        """Replicas and data ranks."""
        return M2NMesh((self._layout.replicas, self._layout.data), 0)

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes, shapes of whole tensors; each is sharded over the data ranks along its first dimension."""
        return [
            M2NParamMeta(spec.name, getattr(torch, spec.dtype), spec.shape, (REPLICATE, 0))
            for spec in self._layout.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._layout.tensors:
            if self.cancelled:
                raise RuntimeError("the push was aborted")
            shard = self._snapshot[spec.name].to(self._device)
            self.nbytes += shard.nbytes
            yield spec.name, shard


def m2n_limit(layout: ShardLayout) -> str:
    """Why nccl_m2n can't send tensors of this layout, as a clause; empty if it can."""
    try:
        import_m2n()
    except ImportError:
        return "the package nccl-extensions is not installed"
    try:
        version = torch.cuda.nccl.version()
    except AttributeError:
        return "torch has no NCCL"
    if version < _M2N_NCCL:
        return f"torch has NCCL {'.'.join(map(str, version))}, and nccl_m2n needs {'.'.join(map(str, _M2N_NCCL))}"
    if layout.tensor > 1:
        return "the trainer divides tensors along two axes"
    if layout.data > MAX_SOURCE_SHARDS:
        return f"more than {MAX_SOURCE_SHARDS} ranks divide a tensor"
    for spec in layout.tensors:
        try:
            check_transferable(spec.name, getattr(torch, spec.dtype), spec.shape)
        except ValueError as error:
            return str(error)
        if spec.shape[0] % layout.data:
            return f"{layout.data} ranks divide {spec.name} of {spec.shape[0]} rows unevenly"
    return ""
