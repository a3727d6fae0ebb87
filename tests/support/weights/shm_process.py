"""One end of the shared memory of a host, started again by its test whenever it dies.

    shm_process.py FOLDER train INCARNATION VERSIONS     offers each version once every generator has the one before
    shm_process.py FOLDER sync_weights                   pushes what is offered, until killed
    shm_process.py FOLDER generate NUMBER VERSIONS       takes what is pushed

    offered      the trainer's file: a line for each version it has offered
    taken-<n>    a generator's: incarnation, version, the fingerprint's digest, and another hash of what it found

Each is armed for failpoints as `train`, `sync_weights`, `generate-<n>`.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

from support.weights.mixed_versions import sha256, tensors_of, weights

from millrace.weights.base import WeightsId
from millrace.weights.shm import ShmReceiver, ShmRelay, ShmSender
from storage.failpoints import arm, failpoint

GENERATORS = 2


def train(folder: Path, incarnation: int, versions: int) -> None:
    writer = ShmSender(folder / "handover", tensors_of(0), GENERATORS)
    offered = folder / "offered"
    offered.touch()
    for version in range(len(offered.read_text().split()), versions):
        writer.publish(weights(version, incarnation))
        append(offered, str(version))
        while not all(has(folder / f"taken-{g}", f"{incarnation} {version} ") for g in range(GENERATORS)):
            time.sleep(0.001)


def sync_weights(folder: Path) -> None:
    relay = ShmRelay(folder / "handover")
    taken: WeightsId | None = None
    while True:
        newest = relay.poll(taken)
        if newest is None:
            time.sleep(0.001)
            continue
        failpoint("sync_weights.before_push")
        relay.publish(newest)
        failpoint("sync_weights.after_push")
        taken = newest.id


def generate(folder: Path, number: int, versions: int) -> None:
    reader = ShmReceiver(folder / "handover", number)
    taken: WeightsId | None = None
    while taken is None or taken.policy_version < versions - 1:
        newest = reader.poll(taken)
        if newest is None:
            time.sleep(0.001)
            continue
        taken = newest.id
        assert newest.manifest.fingerprint is not None
        append(
            folder / f"taken-{number}",
            f"{taken.incarnation} {taken.policy_version} {newest.manifest.fingerprint.digest} {sha256(newest.tensors)}",
        )


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def has(path: Path, beginning: str) -> bool:
    """Whether the last line begins so."""
    lines = path.read_text().splitlines() if path.exists() else []
    return bool(lines) and lines[-1].startswith(beginning)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, role, *numbers = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    if role == "train":
        arm("train")
        train(folder, *numbers)
    elif role == "sync_weights":
        arm("sync_weights")
        sync_weights(folder)
    else:
        arm(f"generate-{numbers[0]}")
        generate(folder, *numbers)
