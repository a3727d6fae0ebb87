"""CUDA's memory handles: a process reads a tensor on a GPU that another process holds, without a copy."""

import pytest
import torch
import torch.multiprocessing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def add_one(tensor: torch.Tensor) -> float:
    """Adds 1 in place; returns the sum of what was there."""
    total = tensor.sum().item()
    tensor.add_(1)
    torch.cuda.synchronize()
    return total


def test_two_processes_share_a_tensor_on_a_gpu() -> None:
    tensor = torch.arange(1000, dtype=torch.float32, device="cuda")
    # Containers without a shared IPC namespace or with a restricted ptrace scope refuse the handles.
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(add_one, (tensor,)) == 499_500
    assert tensor.sum().item() == 500_500
