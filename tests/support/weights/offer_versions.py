"""Offers versions to a store, from the one after the newest on, until killed or done. Run as a process by its test.

    offer_versions.py STORE PROCESS VERSIONS        PROCESS: the name that its failpoints are armed for

Prints the number of each version offered.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.policy_versions import weights

from millrace.weights.store import StoreSender
from storage import layout
from storage.checkpoints import read_latest
from storage.failpoints import arm
from storage.stores.factory import open_store


def main(url: str, process: str, versions: int) -> None:
    arm(process)
    store = open_store(url)
    writer = StoreSender(store)
    latest = read_latest(store, layout.WEIGHTS)
    for version in range(0 if latest is None else latest.step + 1, versions):
        writer.publish(weights(version))
        print(version, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
