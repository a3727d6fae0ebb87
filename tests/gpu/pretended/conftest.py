"""A process group for trainers on a pretended GPU."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def gloo() -> Iterator[None]:
    """A process group of one, as there is no NCCL: with a `compute_dtype` a single process is sharded by FSDP2 too."""
    if dist.is_initialized():
        # Of a trainer of an earlier test, whose group lasts as long as its process.
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()
