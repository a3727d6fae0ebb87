"""The processes that train one policy together, and which of them this is.

                  tensor_rank 0   tensor_rank 1       rank = data_rank · tensor_size + tensor_rank:
    data_rank 0 │    rank 0    │     rank 1    │      the ranks of a row are neighbours, because they
    data_rank 1 │    rank 2    │     rank 3    │      exchange most

A row trains one share of the batch, and each of its ranks computes a part of every layer. A column holds the same part
of every layer, and each of its ranks keeps a shard of it. With replicas (HSDP) a column is cut into groups of
neighbours; each group holds the whole part, and gradients are summed over the groups too.
"""

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

DATA, TENSOR = "data", "tensor"
"""Names of the mesh's two dimensions."""
REPLICATE, SHARD = "replicate", "shard"
"""With replicas, names of the two dimensions in place of `DATA`."""
_PATIENCE = timedelta(days=7)
"""The others wait for rank 0 as long as it waits for rollouts; launcher and supervisor detect dead or hanging ranks."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that train together; without others `mesh` is None."""

    rank: int
    """In [0, size); rank 0 leads."""
    size: int
    """data_size · tensor_size."""
    data_rank: int
    """In [0, data_size): its share of the batch."""
    data_size: int
    tensor_rank: int
    """In [0, tensor_size): its part of every layer."""
    tensor_size: int
    device: torch.device
    """Where it computes."""
    mesh: DeviceMesh | None = field(default=None, compare=False)
    """[data, tensor] ranks by name, or [replicate, shard, tensor]."""

    @classmethod
    def alone(cls, device: torch.device) -> Self:
        """A process that trains without others."""
        return cls(rank=0, size=1, data_rank=0, data_size=1, tensor_rank=0, tensor_size=1, device=device)

    @classmethod
    def join(
        cls,
        *,
        data: int,
        tensor: int,
        device: Literal["cpu", "cuda"],
        shard: int | None = None,
        shrunk: bool = False,
    ) -> Self:
        """Joins the process group of a `torchrun` of data · tensor processes. A single process has no group.

        `shard` neighbouring data ranks divide the weights; None, or a number that does not divide the data ranks: all.
        `shrunk`: hosts may be missing, which reduces the data ranks. Raises ValueError if `torchrun` started another
        number of processes, and KeyError if it did not start this one.
        """
        if shrunk:
            data = min(data, int(os.environ["WORLD_SIZE"]) // tensor)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_device = torch.device("cpu") if device == "cpu" else torch.device("cuda", local_rank)
        if local_device.type == "cuda":
            torch.cuda.set_device(local_device)
        if data * tensor == 1:
            return cls.alone(local_device)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if size != data * tensor:
            raise ValueError(f"torchrun started {size} processes; expected {data} times {tensor}")
        if not dist.is_initialized():
            dist.init_process_group(_backend(local_device), timeout=_PATIENCE)
        return cls(
            rank=rank,
            size=size,
            data_rank=rank // tensor,
            data_size=data,
            tensor_rank=rank % tensor,
            tensor_size=tensor,
            device=local_device,
            mesh=make_mesh(local_device.type, data=data, tensor=tensor, shard=shard),
        )

    @property
    def replicas(self) -> int:
        """How many groups of data ranks each hold the whole model."""
        if self.mesh is None or REPLICATE not in data_dims(self.mesh):
            return 1
        return int(self.mesh[REPLICATE].size())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` over the data ranks, in place, and returns it; same shape and dtype on every rank."""
        if self.mesh is not None and self.data_size > 1:
            for name in data_dims(self.mesh):
                dist.all_reduce(tensor, group=self.mesh[name].get_group())
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; every rank has to call this."""
        raised = torch.tensor(int(flag), device=self.device)
        if self.mesh is not None:
            dist.all_reduce(raised, dist.ReduceOp.MAX)
        return bool(raised)

    def leave(self) -> None:
        """Leaves the process group, once; every rank has to call this."""
        if self.mesh is not None:
            dist.destroy_process_group()


def make_mesh(device: str, *, data: int, tensor: int, shard: int | None = None) -> DeviceMesh:
    """The mesh of all ranks of the process group; `shard` as in `Ranks.join`."""
    if shard is None or shard >= data or data % shard:
        return init_device_mesh(device, (data, tensor), mesh_dim_names=(DATA, TENSOR))
    return init_device_mesh(device, (data // shard, shard, tensor), mesh_dim_names=(REPLICATE, SHARD, TENSOR))


def data_dims(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of the dimensions of the data ranks."""
    return tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mesh_of_one(device: torch.device) -> DeviceMesh:
    """A [data, tensor] mesh of this process only; its process group lasts as long as the process."""
    if not dist.is_initialized():
        # In memory: no other process joins.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    return init_device_mesh(device.type, (1, 1), mesh_dim_names=(DATA, TENSOR))


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


ALONE = Ranks.alone(torch.device("cpu"))
"""The default: no other ranks, on the CPU."""
