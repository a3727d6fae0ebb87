"""A sync_weights that has what the trainer offers sent on. Run as a process by `direct.py`.

Prints a JSON line whenever it has pushed a version, and whenever a late generator has got it: who lacks it.
"""

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.direct import publish_address

from millrace.weights.direct.control import DirectRelay
from storage import failpoints


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    failpoints.arm("sync_weights-0")
    relay = DirectRelay(int(sys.argv[2]), deadline_seconds=float(sys.argv[3]))
    publish_address(Path(sys.argv[1]), relay.address)
    say(ready=True)
    newest, missing = None, None
    while True:
        weights = relay.take(newest)
        if weights is not None:
            newest = weights.id
            relay.offer(weights)
            missing = None
        else:
            relay.tend()
            time.sleep(0.002)
        if newest is not None and relay.missing != missing:
            missing = relay.missing
            say(version=newest.policy_version, missing=sorted(missing), wire_bytes=relay.wire_bytes)
