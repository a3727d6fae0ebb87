"""A rank of a trainer that offers the shards of what it is told to. Run as a process by `direct.py`.

Reads `offer <version>` and answers with a JSON line once it has its snapshot.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.direct import finder, shards_of, trainer_layout

from millrace.weights.direct.trainer import ShardSender
from storage import failpoints


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    failpoints.arm(f"train-{rank}")
    sender = ShardSender(
        finder(folder), trainer_layout(size), rank, device=torch.device("cpu"), deadline_seconds=float(sys.argv[4])
    )
    say(ready=True)
    for line in sys.stdin:
        version = int(line.removeprefix("offer "))
        sender.offer(shards_of(version, rank, size))
        say(offered=version)
