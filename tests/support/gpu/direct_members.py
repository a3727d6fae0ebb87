"""The members of a push by `direct`, each a process with a device, on CPUs or on GPUs.

    python direct_members.py DEVICE RANK SIZE PORT     rank SIZE − 1 is the generator; cuda: rank r has GPU r

A member pushes two versions through one group, as `exchange.py` does, and compares the tensors that arrived, bit for
bit. It ends with an error if anything differs.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.direct_policies import POLICIES, shards

from flows.deployment.server import free_port
from millrace.weights.direct.exchange import PushGroup, receive_whole, send_parts
from millrace.weights.fingerprint import fingerprint

PATIENT = 120.0
_LIMIT_SECONDS = 300.0


def push_between(size: int, device: Literal["cpu", "cuda"]) -> None:
    """Runs a push of a trainer of `size` − 1 ranks to a generator. Fails with the output of the member that failed."""
    port = free_port()
    members = [
        subprocess.Popen(
            [sys.executable, __file__, device, str(rank), str(size), str(port)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank, member in enumerate(members):
            output, _ = member.communicate(timeout=_LIMIT_SECONDS)
            assert member.returncode == 0, f"rank {rank} of {size}:\n{output[-4000:]}"
    finally:
        for member in members:
            member.kill()
            member.wait()


def main(device: torch.device, rank: int, size: int, port: int) -> None:
    policy, trainers = POLICIES["llama"], size - 1
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=PATIENT))
    # With two tensor ranks where that divides them: columns then arrive in parts.
    tensor = 2 if trainers % 2 == 0 else 1
    layout = policy.layout(trainers // tensor, tensor)
    messages = layout.messages()
    group = PushGroup(store, "127.0.0.1", device, rank=rank, size=size, seconds=PATIENT)
    for version in (1, 2):
        expected, until = policy.tensors(version), time.monotonic() + PATIENT
        if rank < trainers:
            parts = {name: part.contiguous().to(device) for name, part in shards(expected, layout, rank).items()}
            sent = send_parts(group, parts, messages, target=trainers, until=until)
            assert sent == sum(parts[message.spec.name].nbytes for message in messages if message.source == rank)
            continue
        received = {name: torch.zeros_like(whole).to(device) for name, whole in expected.items()}
        assert receive_whole(group, received, messages, trainers=trainers, until=until) == 0
        assert fingerprint(received) == fingerprint(expected), f"version {version}"
    # A member that left while another is still at work would look like a failure.
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.01)
    if rank == 0:
        # The store ends with this process.
        time.sleep(1.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if sys.argv[1] == "cuda":
        device = torch.device("cuda", int(sys.argv[2]))
        torch.cuda.set_device(device)
    main(device, *map(int, sys.argv[2:]))
