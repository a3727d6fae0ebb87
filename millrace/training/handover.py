"""How the trainer hands a version over to sync_weights: whole, or each rank its own shards.

version ─► whole: gathered from all ranks, copied to shared memory by rank 0
        └► shards: every rank takes a snapshot of its own (millrace/weights/direct) and sends it on by itself
"""

import json
from abc import ABC, abstractmethod
from contextlib import nullcontext

from millrace.training.parallel.leader import LeaderTrainer, hand_over
from millrace.training.parallel.messages import Command
from millrace.training.trainer import Trainer
from millrace.weights.base import HandoverSender, Manifest, Weights
from millrace.weights.direct.sender import ShardSender


class Handover(ABC):
    """Rank 0's end."""

    @abstractmethod
    def offer(self, manifest: Manifest) -> None:
        """Hands over the live weights, which are those of `manifest`."""

    @abstractmethod
    def is_wanted_again(self) -> bool:
        """Whether generators need what was offered last once more, because it has been lost or damaged since."""

    def tend(self) -> None:  # noqa: B027 — a whole version is never owed
        """Hands over what could not be at first, if it can be now. The live weights must still be the same."""

    def forget(self) -> None:  # noqa: B027 — a whole version is never owed
        """The live weights are about to change."""


class WholeHandover(Handover):
    """Whole tensors, by a transport of one process."""

    def __init__(self, trainer: Trainer, sender: HandoverSender) -> None:
        self._trainer = trainer
        self._sender = sender

    def offer(self, manifest: Manifest) -> None:
        self._sender.publish(Weights(manifest=manifest, tensors=self._trainer.weights()))

    def is_wanted_again(self) -> bool:
        return self._sender.resend_requested()


class ShardHandover(Handover):
    """Every rank's shards. While a push reads the snapshots, a version is owed, or skipped if it is over by then."""

    def __init__(self, trainer: Trainer, sender: ShardSender) -> None:
        self._trainer = trainer
        self._sender = sender
        self._owed: Manifest | None = None

    def offer(self, manifest: Manifest) -> None:
        self._owed = manifest
        self.tend()

    def tend(self) -> None:
        if self._owed is None or self._sender.busy:
            return
        manifest, self._owed = self._owed, None
        trainer = self._trainer
        payload = json.dumps(manifest.to_json()).encode()
        together = (
            trainer.followers.together(Command.HAND_OVER, payload)
            if isinstance(trainer, LeaderTrainer)
            else nullcontext()
        )
        with together:
            hand_over(trainer, self._sender, manifest)

    def is_wanted_again(self) -> bool:
        return self._owed is None and self._sender.resend_requested()

    def forget(self) -> None:
        self._owed = None
