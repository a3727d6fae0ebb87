"""A sync_weights that broadcasts what it is told to. Run as a process by `broadcasting.py`.

Reads `offer <version>`, `tend`, and `deliver <version>`, which is to offer it and tend until all have it; answers each
with a JSON line that says which generators lack the newest version.
"""

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.broadcasting import publish_address, weights_of

from millrace.weights.broadcast import BroadcastWriter
from storage import failpoints


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    failpoints.arm("sync_weights-0")
    writer = BroadcastWriter(int(sys.argv[2]), deadline_seconds=float(sys.argv[3]))
    publish_address(Path(sys.argv[1]), writer.address)
    say(ready=True)
    for line in sys.stdin:
        match line.split():
            case ["offer", version]:
                writer.offer(weights_of(int(version)))
            case ["tend"]:
                writer.tend()
            case ["deliver", version]:
                writer.offer(weights_of(int(version)))
                while writer.missing:
                    writer.tend()
                    time.sleep(0.005)
            case other:
                raise ValueError(f"expected offer, tend or deliver, not {other}")
        say(missing=sorted(writer.missing))
