"""vLLM's engine `nccl` over gloo, for trainers and vLLM on CPUs: the calls and their order are vLLM's own.

trainer rank 0: broadcast, tensor by tensor ═══► rank 1 …: workers of the generators, load_weights
"""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from millrace.weights.direct.exchange import PushGroup
from storage.failpoints import failpoint

NAME = "gloo"
_CPU = torch.device("cpu")


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker joins."""

    master_address: str
    master_port: int
    world_size: int
    seconds: float
    """Limit of one broadcast."""


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """How the trainer's rank 0 opens the group."""

    backend: ClassVar[str] = NAME
    master_address: str
    world_size: int
    seconds: float


class GlooTrainerEngine(NCCLTrainerWeightTransferEngine):
    """Rank 0 broadcasts; the other ranks of the trainer only iterate the source."""

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: VLLMWeightSyncClient, source: WeightSource | None = None) -> Self:
        assert source is not None
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, packed=False)
        if engine.is_sender:
            listening = socket.create_server((init_info.master_address, 0))
            host, port = listening.getsockname()
            store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
            worker_info = {
                "master_address": host,
                "master_port": port,
                "world_size": init_info.world_size,
                "seconds": init_info.seconds,
            }
            with ThreadPoolExecutor(max_workers=1) as threads:
                joining = threads.submit(client.init_weight_transfer_engine, worker_info)
                engine.model_update_group = PushGroup(
                    store, host, _CPU, rank=0, size=init_info.world_size, seconds=init_info.seconds
                )
                joining.result()
        return engine

    def _broadcast(self, source: WeightSource, meta: list[ParamMeta]) -> None:
        if not self.is_sender:
            super()._broadcast(source, meta)
            return
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.contiguous(), 0)


class GlooWorkerEngine(NCCLWeightTransferEngine):
    """A worker receives whole tensors, and loads its share of each."""

    init_info_cls: Any = GlooInitInfo

    def init_transfer_engine(self, init_info: Any) -> None:
        """Joins the group, after the workers of the generators before this one."""
        address = init_info.master_address, init_info.master_port
        limit = timedelta(seconds=init_info.seconds)
        store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
        with socket.create_connection(address, timeout=init_info.seconds) as probe:
            host = probe.getsockname()[0]
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.model_update_group = PushGroup(
            store, host, _CPU, rank=rank, size=init_info.world_size, seconds=init_info.seconds
        )

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receives the tensors and has the model load them."""
        self.model.load_weights(self._tensors(update_info))

    def _tensors(self, update_info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            failpoint("live.received")
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.model_update_group.broadcast(tensor, 0)
            yield name, tensor


def destroy_group(engine: Any) -> None:
    """Destroys the communicator of one of vLLM's engines, if it has any.

    Not the engine itself: vLLM's `shutdown` waits for the device.
    """
    group = getattr(engine, "model_update_group", None) or getattr(engine, "group", None)
    if group is not None:
        group.destroy()


WeightTransferEngineFactory.register_engine(NAME, GlooWorkerEngine)
WeightTransferTrainerFactory.register_engine(NAME, GlooTrainerEngine)
