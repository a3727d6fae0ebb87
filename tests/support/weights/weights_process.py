"""One end of a transport as a process, started again by its test whenever it dies; armed for failpoints as ROLE.

weights_process.py train FOLDER INCARNATION VERSIONS   offers each version once every generator has the one before
weights_process.py sync_weights FOLDER                 relays every offered version, until killed
weights_process.py generate-<n> FOLDER VERSIONS        polls until it has the last version
weights_process.py race-<n> FOLDER VERSIONS            the same; every element of version v is v; prints how many
weights_process.py store URL VERSIONS                  publishes to a store from its newest version on; prints each

offered      the trainer's file: a line for each version it has offered
taken-<n>    a generator's: incarnation, version, the fingerprint's digest, and another hash of its tensors
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

from support.weights.versions import mixed, mixed_tensors, sha256, trained

from millrace.weights.base import Weights, WeightsId
from millrace.weights.shm import ShmReceiver, ShmRelay, ShmSender
from millrace.weights.store import StoreSender
from storage import layout
from storage.checkpoints import read_latest
from storage.failpoints import arm, failpoint
from storage.stores.factory import open_store

GENERATORS = 2


def train(folder: Path, incarnation: int, versions: int) -> None:
    sender = ShmSender(folder / "handover", mixed_tensors(0), GENERATORS)
    offered = folder / "offered"
    offered.touch()
    for version in range(len(offered.read_text().split()), versions):
        sender.publish(mixed(version, incarnation))
        append(offered, str(version))
        while not all(has(folder / f"taken-{g}", f"{incarnation} {version} ") for g in range(GENERATORS)):
            time.sleep(0.001)


def sync_weights(folder: Path) -> None:
    relay = ShmRelay(folder / "handover")
    held: WeightsId | None = None
    while True:
        newest = relay.poll(held)
        if newest is None:
            time.sleep(0.001)
            continue
        failpoint("sync_weights.before_push")
        relay.publish(newest)
        failpoint("sync_weights.after_push")
        held = newest.id


def received(folder: Path, number: int, versions: int) -> Iterator[Weights]:
    receiver = ShmReceiver(folder / "handover", number)
    held: WeightsId | None = None
    while held is None or held.policy_version < versions - 1:
        newest = receiver.poll(held)
        if newest is None:
            time.sleep(0.0002)
            continue
        if not newest.id.newer_than(held):
            raise AssertionError(f"{newest.id} came after {held}")
        held = newest.id
        yield newest


def generate(folder: Path, number: int, versions: int) -> None:
    for newest in received(folder, number, versions):
        version, tensors = f"{newest.id.incarnation} {newest.id.policy_version}", newest.tensors
        append(folder / f"taken-{number}", f"{version} {newest.fingerprint.digest} {sha256(tensors)}")


def race(folder: Path, number: int, versions: int) -> None:
    print("ready", flush=True)
    taken = []
    for newest in received(folder, number, versions):
        taken.append(newest.id.policy_version)
        for name, tensor in newest.tensors.items():
            if not torch.equal(tensor, torch.full_like(tensor, taken[-1])):
                raise AssertionError(f"{name} of version {taken[-1]} holds {tensor.min()} … {tensor.max()}")
    print(len(taken))


def publish_to_store(url: str, versions: int) -> None:
    store = open_store(url)
    sender = StoreSender(store)
    latest = read_latest(store, layout.WEIGHTS)
    for version in range(0 if latest is None else latest.step + 1, versions):
        sender.publish(trained(version))
        print(version, flush=True)


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def has(path: Path, beginning: str) -> bool:
    """Whether the last line begins so."""
    lines = path.read_text().splitlines() if path.exists() else []
    return bool(lines) and lines[-1].startswith(beginning)


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, place, *numbers = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    arm(role.replace("race", "generate"))
    match role.split("-"):
        case ["train"]:
            train(Path(place), *numbers)
        case ["sync_weights"]:
            sync_weights(Path(place))
        case ["generate", number]:
            generate(Path(place), int(number), *numbers)
        case ["race", number]:
            race(Path(place), int(number), *numbers)
        case _:
            publish_to_store(place, *numbers)
