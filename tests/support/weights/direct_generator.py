"""A generator that takes what comes by `direct` and says so. Run as a process by `direct.py`.

Prints a JSON line for each version, with the digest of what another process would find in the memory it names; and one
for each that was refused. Ends with an error if a version ran backwards.
"""

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.direct import finder

from millrace.errors import WeightsCorrupt
from millrace.weights.base import WeightsId
from millrace.weights.direct.generator import DirectReader
from millrace.weights.fingerprint import fingerprint
from storage import failpoints


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def take_until(reader: DirectReader, last_version: int) -> None:
    newest: WeightsId | None = None
    while newest is None or newest.policy_version < last_version:
        try:
            weights = reader.take(newest)
        except WeightsCorrupt as error:
            say(refused=str(error))
            continue
        if weights is None:
            time.sleep(0.002)
            continue
        if not weights.id.newer_than(newest):
            raise AssertionError(f"{weights.id} came after {newest}")
        assert weights.shared is not None
        newest = weights.id
        say(version=newest.policy_version, digest=fingerprint(weights.shared.map()).digest)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    failpoints.arm(f"generate-{number}")
    reader = DirectReader(finder(folder), number, folder / f"received-{number}", deadline_seconds=float(sys.argv[3]))
    say(ready=True)
    # It is not closed: the interpreter must end well all the same.
    take_until(reader, int(sys.argv[4]))
