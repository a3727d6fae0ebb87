"""All ends of one handover file, in one process."""

from pathlib import Path

from support.weights.versions import Tensors, mixed, mixed_tensors, sha256

from millrace.weights.base import Weights
from millrace.weights.shm import ShmReceiver, ShmRelay, ShmSender


class Host:
    """The trainer, sync_weights and the generators of one file, in one process."""

    def __init__(self, folder: Path, like: Tensors | None = None, num_generators: int = 2) -> None:
        self.path = folder / "handover"
        self.trainer = ShmSender(self.path, mixed_tensors(0) if like is None else like, num_generators)
        self.sync = ShmRelay(self.path)
        self.generators = [ShmReceiver(self.path, generator) for generator in range(num_generators)]

    def push(self) -> None:
        """Relays the newest version, as sync_weights does."""
        taken = self.sync.poll(None)
        assert taken is not None
        self.sync.publish(taken)

    def deliver(self, version: int) -> None:
        """Publishes a version and relays it to the generators."""
        self.trainer.publish(mixed(version))
        self.push()


def assert_is(taken: Weights | None, version: int, incarnation: int = 0) -> None:
    """That this version was taken, every bit of it."""
    assert taken is not None
    assert (taken.id.policy_version, taken.id.incarnation) == (version, incarnation)
    assert sha256(taken.tensors) == sha256(mixed_tensors(version, incarnation))
