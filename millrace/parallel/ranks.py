"""The processes that train one policy together, and which of them this is.

                  tensor_rank 0   tensor_rank 1       rank = data_rank · tensor_size + tensor_rank:
    data_rank 0 │    rank 0    │     rank 1    │      those of one row are neighbours, so that the busiest
    data_rank 1 │    rank 2    │     rank 3    │      traffic has the shortest way

A row trains one share of the batch, its ranks each a part of every layer. A column holds the same part of every layer,
its ranks each a shard of it.
"""

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA, TENSOR = "data", "tensor"
"""Names of the mesh's two dimensions."""
_PATIENCE = timedelta(days=7)
"""The others wait for rank 0 as long as it waits for rollouts; that someone died or hangs is seen by who started us."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    """In [0, size); rank 0 speaks for all."""
    size: int
    """data_size · tensor_size."""
    data_rank: int
    """In [0, data_size): which share of the batch it trains."""
    data_size: int
    tensor_rank: int
    """In [0, tensor_size): which part of every layer it computes."""
    tensor_size: int
    device: torch.device
    """What it computes on."""
    mesh: DeviceMesh | None = field(default=None, compare=False)
    """[data, tensor] ranks, by name; None in a process that is alone and in no process group."""

    @classmethod
    def alone(cls, device: torch.device) -> Self:
        """One process that trains by itself."""
        return cls(rank=0, size=1, data_rank=0, data_size=1, tensor_rank=0, tensor_size=1, device=device)

    @classmethod
    def join(cls, *, data: int, tensor: int, device: Literal["cpu", "cuda"]) -> Self:
        """Meets the others of a `torchrun` of data · tensor processes; alone, and without a meeting, where that is 1.

        On CPUs they talk over gloo; on GPUs over NCCL, and over gloo about tensors on the CPU. Raises ValueError where
        `torchrun` started another number of processes, and KeyError where it started none.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        own = torch.device("cpu") if device == "cpu" else torch.device("cuda", local_rank)
        if own.type == "cuda":
            torch.cuda.set_device(own)
        if data * tensor == 1:
            return cls.alone(own)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if size != data * tensor:
            raise ValueError(f"torchrun started {size} processes; expected {data} times {tensor}")
        if not dist.is_initialized():
            dist.init_process_group(_backend(own), timeout=_PATIENCE)
        return cls(
            rank=rank,
            size=size,
            data_rank=rank // tensor,
            data_size=data,
            tensor_rank=rank % tensor,
            tensor_size=tensor,
            device=own,
            mesh=init_device_mesh(own.type, (data, tensor), mesh_dim_names=(DATA, TENSOR)),
        )

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds up `tensor`, of one shape and type everywhere, over the data ranks, in place, and returns it."""
        if self.mesh is not None and self.data_size > 1:
            dist.all_reduce(tensor, group=self.mesh[DATA].get_group())
        return tensor

    def leave(self) -> None:
        """Ends the talk with the others, once; every rank has to come here."""
        if self.mesh is not None:
            dist.destroy_process_group()


def mesh_of_one(device: torch.device) -> DeviceMesh:
    """[data, tensor] of this process only, for what asks for a mesh; its group lasts as long as the process does."""
    if not dist.is_initialized():
        # Nobody else has to find it.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    return init_device_mesh(device.type, (1, 1), mesh_dim_names=(DATA, TENSOR))


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


ALONE = Ranks.alone(torch.device("cpu"))
"""The only process there is, on the CPU."""
