"""A process group for trainers on a pretended GPU."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def gloo() -> Iterator[None]:
    """A gloo process group of one, because NCCL needs a GPU; FSDP2 shards it if there is a `compute_dtype`."""
    if dist.is_initialized():
        # Of a trainer of an earlier test, whose group lasts as long as its process.
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()
