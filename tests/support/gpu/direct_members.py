"""The members of a push by `direct`, each a process with a device, on CPUs or on GPUs.

    python direct_members.py DEVICE RANK SIZE PORT END     rank SIZE − 1 is the generator; cuda: rank r has GPU r

A member pushes two versions through one group, as `exchange.py` does, and compares the tensors that arrived, bit for
bit. It ends with an error if anything differs. If END is `killed`, the generator kills itself in the second push, and
the trainer's ranks have to get an error before the deadline.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.direct_policies import POLICIES, shards

from flows.deployment.server import free_port
from millrace.weights.direct.exchange import PushGroup, receive_whole, send_parts
from millrace.weights.fingerprint import fingerprint

PATIENT = 120.0
_DEADLINE_OF_A_KILLED_PUSH = 20.0
_LIMIT_SECONDS = 300.0


def push_between(size: int, device: Literal["cpu", "cuda"], *, killed: bool = False) -> None:
    """Runs a push of a trainer of `size` − 1 ranks to a generator, which is `killed` in it or not.

    Fails with the output of the member that failed.
    """
    port = free_port()
    members = [
        subprocess.Popen(
            [sys.executable, __file__, device, str(rank), str(size), str(port), "killed" if killed else "whole"],
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
            expected = -signal.SIGKILL if killed and rank == size - 1 else 0
            assert member.returncode == expected, f"rank {rank} of {size}:\n{output[-4000:]}"
    finally:
        for member in members:
            member.kill()
            member.wait()


def main(device: torch.device, rank: int, size: int, port: int, *, killed: bool) -> None:
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
            if killed and version == 2:
                until = time.monotonic() + _DEADLINE_OF_A_KILLED_PUSH
                # Small messages may fit into buffers, so the first pushes may not notice.
                with pytest.raises(RuntimeError):
                    while True:
                        send_parts(group, parts, messages, target=trainers, until=until)
                return
            sent = send_parts(group, parts, messages, target=trainers, until=until)
            assert sent == sum(parts[message.spec.name].nbytes for message in messages if message.source == rank)
            continue
        received = {name: torch.zeros_like(whole).to(device) for name, whole in expected.items()}
        if killed and version == 2:
            receive_whole(group, received, messages[: len(messages) // 2], trainers=trainers, until=until)
            os.kill(os.getpid(), signal.SIGKILL)
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
    rank, size, port = map(int, sys.argv[2:5])
    main(device, rank, size, port, killed=sys.argv[5] == "killed")
