"""A generator that takes weights as fast as it can until it gets a certain version. Run as a process by its test.

    take_until_version.py PATH GENERATOR LAST_VERSION

Prints `ready` once it reads, and at the end how many versions it took. Ends with an error if a version ran backwards
or a tensor held anything but its version's number.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from millrace.weights.base import WeightsId, WeightsReceiver
from millrace.weights.shm import ShmReceiver
from storage.failpoints import arm


def take_until(reader: WeightsReceiver, last_version: int) -> int:
    newest: WeightsId | None = None
    count = 0
    while newest is None or newest.policy_version < last_version:
        weights = reader.poll(newest)
        if weights is None:
            continue
        version = weights.id.policy_version
        if newest is not None and version <= newest.policy_version:
            raise AssertionError(f"version {version} came after {newest.policy_version}")
        for name, tensor in weights.tensors.items():
            if not torch.equal(tensor, torch.full_like(tensor, version)):
                raise AssertionError(f"{name} of version {version} holds {tensor.min()} … {tensor.max()}")
        newest = weights.id
        count += 1
    return count


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, generator, last_version = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    arm(f"generate-{generator}")
    reader = ShmReceiver(path, generator)
    print("ready", flush=True)
    print(take_until(reader, last_version))
