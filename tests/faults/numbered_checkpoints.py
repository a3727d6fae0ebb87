"""Commits checkpoints of steps 0, 1, 2 …, until it is killed, fenced or done. Run as a process by its tests.

    numbered_checkpoints.py STORE PROCESS STEPS         PROCESS: the name that its failpoints are armed for

Prints the number of checkpoints committed so far: when it has opened, and after each commit.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from storage.checkpoints import CheckpointWriter
from storage.failpoints import arm
from storage.stores.factory import open_store


def files_of(step: int) -> dict[str, bytes]:
    """Two files that no other step has."""
    return {"model": b"%d model " % step * 100, "optimizer": b"%d optimizer " % step * 200}


def main(url: str, process: str, steps: int) -> None:
    arm(process)
    writer = CheckpointWriter(open_store(url), writer=process)
    step = 0 if writer.latest is None else writer.latest.step + 1
    print(step, flush=True)
    while step < steps:
        writer.commit(step, files_of(step), {"step": step})
        step += 1
        print(step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
