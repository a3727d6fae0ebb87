"""A rank of a trainer that offers the shards of what it is told to. Run as a process by `direct.py`.

Reads `offer <version>` and answers with a JSON line once it has its snapshot; reads `measure` and tells what it sent.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.direct import finder, id_of, shards
from support.weights.direct_policies import POLICIES

from millrace.weights.base import Manifest, Weights
from millrace.weights.direct.trainer import ShardSender
from storage import failpoints


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank, policy = Path(sys.argv[1]), int(sys.argv[2]), POLICIES[sys.argv[5]]
    layout = policy.layout(data=int(sys.argv[3]), tensor=int(sys.argv[4]))
    failpoints.arm(f"train-{rank}")
    sender = ShardSender(finder(folder), layout, rank, device=torch.device("cpu"), deadline_seconds=float(sys.argv[6]))
    say(ready=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "measure":
            say(sent_bytes=sender.wire_bytes)
            continue
        version = int(argument)
        parts = shards(policy.tensors(version), layout, rank)
        sender.offer(Weights(manifest=Manifest(id=id_of(version)), tensors=parts))
        say(offered=version)
