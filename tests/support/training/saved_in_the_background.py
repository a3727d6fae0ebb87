"""A trainer that is alone, and saves versions 0, 1, 2 … in the background until it is killed or done; a process.

    python -m support.training.saved_in_the_background STORE PROCESS VERSIONS      PROCESS: armed for its failpoints

Of version v every weight is v, and so is the state.
"""

import sys

import torch

from millrace.training.checkpoints.names import MODEL
from millrace.training.checkpoints.saving import AsyncCheckpoints
from millrace.training.parallel.ranks import ALONE
from storage.checkpoints import CheckpointWriter
from storage.failpoints import arm
from storage.stores.factory import open_store


def main(url: str, process: str, versions: int) -> None:
    arm(process)
    store = open_store(url)
    weight = torch.zeros(100)
    with AsyncCheckpoints(store, ALONE, CheckpointWriter(store)) as checkpoints:
        for version in range(versions):
            weight.fill_(version)
            checkpoints.begin(version, {MODEL: {"weight": weight}}, {"version": version})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
