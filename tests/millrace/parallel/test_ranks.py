"""A process among those that train together; of several, `test_sharding` tells."""

import torch
import torch.distributed as dist

from millrace.parallel.ranks import ALONE, Ranks


def test_who_trains_alone_meets_nobody() -> None:
    ranks = Ranks.join(data=1, tensor=1, device="cpu")
    assert ranks == ALONE
    assert ranks.mesh is None
    assert not dist.is_initialized()
    ranks.leave()


def test_alone_a_sum_is_what_was_given() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert ALONE.sum(tensor) is tensor
    assert tensor.tolist() == [1.0, 2.0]
