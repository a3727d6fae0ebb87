"""Starts the members of a push by `direct`, on CPUs or on GPUs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from flows.deployment.server import free_port

_LIMIT_SECONDS = 300.0


def push_between(size: int, device: Literal["cpu", "cuda"]) -> None:
    """A trainer of `size` − 1 ranks and a generator push; AssertionError with the output of one that fails."""
    script, port = Path(__file__).with_name("direct_member.py"), free_port()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    members = [
        subprocess.Popen(
            [sys.executable, str(script), device, str(rank), str(size), str(port)],
            env=environment,
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
