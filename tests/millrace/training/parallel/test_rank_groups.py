"""A rank without others; for several see `test_sharding`."""

import subprocess
import sys

import torch

from millrace.training.parallel.ranks import ALONE, Ranks

# In a separate process: a mesh of one, which other tests make, leaves a process group behind.
JOINS = """
import torch.distributed as dist
from millrace.training.parallel.ranks import Ranks
ranks = Ranks.join(data=1, tensor=1, device="cpu")
assert not dist.is_initialized()
ranks.leave()
"""


def test_a_single_rank_has_no_mesh() -> None:
    ranks = Ranks.join(data=1, tensor=1, device="cpu")
    assert ranks == ALONE
    assert ranks.mesh is None


def test_a_single_rank_joins_no_process_group() -> None:
    subprocess.run([sys.executable, "-c", JOINS], check=True)


def test_the_sum_over_a_single_rank_is_the_tensor_itself() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert ALONE.sum(tensor) is tensor
    assert tensor.tolist() == [1.0, 2.0]
