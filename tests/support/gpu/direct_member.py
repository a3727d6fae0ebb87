"""A member of one push by `direct`: a rank of the trainer, or the generator, each a process with its own device.

    python direct_member.py DEVICE RANK SIZE PORT     rank SIZE − 1 is the generator; cuda: rank r has GPU r

Pushes two versions through one group, as `exchange.py` does, and compares what arrived, and its sums, bit for bit.
Ends with an error if anything differs.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.direct import shards
from support.weights.direct_policies import POLICIES

from millrace.weights.direct.exchange import Buckets, Exchange, Parts
from millrace.weights.direct.group import Group
from millrace.weights.direct.sums import region_sums
from millrace.weights.transfer.generator_layouts import whole_layout
from millrace.weights.transfer.plan import plan_transfer

PATIENT = 120.0
BUCKET_BYTES = 1 << 16
"""Small, so that there are many messages."""
_GAPS = 1000
"""Bytes: messages have gaps of up to 15 between slices."""


def main(device: torch.device, rank: int, size: int, port: int) -> None:
    policy, last = POLICIES["llama"], size - 1
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=PATIENT))
    plan = plan_transfer(policy.layout(data=last, tensor=1), [whole_layout(policy.specs)], bucket_bytes=BUCKET_BYTES)
    mine = plan.source if rank < last else plan.generators[0]
    boxes = mine.held(rank if rank < last else 0)
    shapes = {spec.name: spec.shape for spec in policy.specs}
    group = Group(store, "push", "127.0.0.1", device, rank=rank, size=size, seconds=PATIENT)
    buckets = Buckets(device)
    for version in (1, 2):
        expected = shards(policy.tensors(version), mine, rank if rank < last else 0)
        tensors = {
            name: (part if rank < last else torch.zeros_like(part)).to(device) for name, part in expected.items()
        }
        exchange = Exchange(group, rank, Parts(tensors, boxes), buckets, time.monotonic() + PATIENT)
        exchange.run(plan.hops(rank))
        for moved, planned in (
            (exchange.sent_bytes, plan.sent[rank]),
            (exchange.received_bytes, plan.received[rank]),
        ):
            assert 0 <= moved - planned <= _GAPS
        for name, part in expected.items():
            assert torch.equal(tensors[name].cpu(), part), f"version {version}: {name}"
        assert region_sums(tensors, boxes, shapes) == region_sums(expected, boxes, shapes)
    # Nobody leaves while another may still be at work: that would look like a failure.
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.01)
    if rank == 0:
        # The store ends with this process.
        time.sleep(1.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    own = torch.device("cpu")
    if sys.argv[1] == "cuda":
        own = torch.device("cuda", int(sys.argv[2]))
        torch.cuda.set_device(own)
    main(own, *map(int, sys.argv[2:]))
