"""A trainer on a GPU as a member of `direct`: its snapshot, its sums and its buckets."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.weights.direct import Push, assert_is, finder, tensors_of
from support.weights.direct_policies import POLICIES

from millrace.weights.direct.exchange import Buckets, Parts
from millrace.weights.direct.generator import DirectReader
from millrace.weights.direct.sums import region_sums
from millrace.weights.transfer.generator_layouts import whole_layout
from millrace.weights.transfer.plan import plan_transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

DEADLINE = 30.0
GPU = torch.device("cuda")


def test_what_trainer_ranks_on_a_gpu_offer_arrives_bit_for_bit(tmp_path: Path) -> None:
    with (
        closing(Push(tmp_path, 1, deadline_seconds=DEADLINE)) as push,
        closing(DirectReader(finder(tmp_path), 0, tmp_path / "received", deadline_seconds=DEADLINE)) as reader,
    ):
        push.offer(1, {name: tensor.to(GPU) for name, tensor in tensors_of(1).items()})
        push.tend_until_missing(set())
        assert_is(reader.take(None), 1)


@pytest.mark.parametrize("name", ["odd", "llama"])
def test_a_gpu_takes_the_sums_that_a_cpu_takes(name: str) -> None:
    policy = POLICIES[name]
    tensors = policy.tensors(1)
    boxes = {spec.name: spec.whole for spec in policy.specs}
    shapes = {spec.name: spec.shape for spec in policy.specs}
    on_gpu = {name: tensor.to(GPU) for name, tensor in tensors.items()}
    assert region_sums(on_gpu, boxes, shapes) == region_sums(tensors, boxes, shapes)


def test_messages_are_packed_and_unpacked_on_a_gpu() -> None:
    policy = POLICIES["odd"]
    plan = plan_transfer(policy.layout(1, 1), [whole_layout(policy.specs)], bucket_bytes=1 << 16)
    boxes, bucket = plan.source.held(0), Buckets(GPU).get()[0]
    tensors = {name: tensor.to(GPU) for name, tensor in policy.tensors(1).items()}
    arrived = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for hop in plan.hops(0):
        Parts(tensors, boxes).pack(hop.message, bucket)
        Parts(arrived, boxes).unpack(hop.message, bucket)
    for name, tensor in tensors.items():
        assert torch.equal(arrived[name], tensor), name
