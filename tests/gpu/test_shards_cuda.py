"""A trainer on a GPU as a member of `direct`: its snapshot."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.weights.direct import Pushes, assert_is, finder, tensors_of

from millrace.weights.direct.receiver import DirectReceiver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

DEADLINE = 30.0
GPU = torch.device("cuda")


def test_what_trainer_ranks_on_a_gpu_offer_arrives_bit_for_bit(tmp_path: Path) -> None:
    with (
        closing(Pushes(tmp_path, 1, deadline_seconds=DEADLINE)) as pushes,
        closing(DirectReceiver(finder(tmp_path), 0, tmp_path / "received", deadline_seconds=DEADLINE)) as receiver,
    ):
        pushes.push(1, {name: tensor.to(GPU) for name, tensor in tensors_of(1).items()})
        pushes.retry_until_missing(set())
        assert_is(receiver.poll(None), 1)
