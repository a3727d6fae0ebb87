"""Hands a version over from the trainer to sync_weights: whole, or as shards by each rank.

version ─► whole: gathered from all ranks, copied to shared memory by rank 0
        └► shards: every rank takes a snapshot of its shards and sends them itself (millrace/weights/direct)
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
    def publish(self, manifest: Manifest) -> None:
        """Hands over the live weights, which `manifest` describes."""

    @abstractmethod
    def resend_requested(self) -> bool:
        """Whether the last version must be published again, because it was lost or damaged."""

    def retry_pending(self) -> None:  # noqa: B027 — a whole version is never deferred
        """Hands over a deferred version if possible. The live weights must not have changed."""

    def discard_pending(self) -> None:  # noqa: B027 — a whole version is never deferred
        """Drops a deferred version. Call before the live weights change."""


class WholeHandover(Handover):
    """Whole tensors, by a transport of one process."""

    def __init__(self, trainer: Trainer, sender: HandoverSender) -> None:
        self._trainer = trainer
        self._sender = sender

    def publish(self, manifest: Manifest) -> None:
        self._sender.publish(Weights(manifest=manifest, tensors=self._trainer.weights()))

    def resend_requested(self) -> bool:
        return self._sender.resend_requested()


class ShardHandover(Handover):
    """Publishes each rank's shards.

    If the previous push is still reading, the version is deferred, and dropped when a newer one arrives.
    """

    def __init__(self, trainer: Trainer, sender: ShardSender) -> None:
        self._trainer = trainer
        self._sender = sender
        self._pending: Manifest | None = None

    def publish(self, manifest: Manifest) -> None:
        self._pending = manifest
        self.retry_pending()

    def retry_pending(self) -> None:
        if self._pending is None or self._sender.busy:
            return
        manifest, self._pending = self._pending, None
        trainer = self._trainer
        payload = json.dumps(manifest.to_json()).encode()
        together = (
            trainer.followers.together(Command.HAND_OVER, payload)
            if isinstance(trainer, LeaderTrainer)
            else nullcontext()
        )
        with together:
            hand_over(trainer, self._sender, manifest)

    def resend_requested(self) -> bool:
        return self._pending is None and self._sender.resend_requested()

    def discard_pending(self) -> None:
        self._pending = None
