"""Hands a version over from the trainer to sync_weights: whole, or as shards by each rank.

version ─► whole: gathered from all ranks, copied to shared memory by rank 0
        └► shards: every rank takes a snapshot of its shards and sends them itself (millrace/weights/direct)
"""

import torch

from configs.operation import SHARDED, vllm_workers
from configs.schema import RunConfig
from millrace.runtime.stage import Stage
from millrace.training.parallel.leader import hand_over_all_shards
from millrace.training.parallel.sharding import layout
from millrace.training.trainer import Trainer
from millrace.weights.base import HandoverSender, Manifest, Weights
from millrace.weights.direct.sender import ShardSender
from millrace.weights.factory import rank_end, trainer_end
from storage.stores.base import Store


class Handover:
    """Rank 0's end. `sender` takes whole versions, or rank 0's shards.

    If the previous push is still reading the shards, the version is deferred. It is retried between steps, and dropped
    if the push is still reading when the next step begins. After the last step, it waits for the push.
    """

    def __init__(self, trainer: Trainer, sender: HandoverSender) -> None:
        self._trainer = trainer
        self._sender = sender
        self._pending: Manifest | None = None

    def publish(self, manifest: Manifest) -> None:
        """Hands over the live weights, which `manifest` describes."""
        self._pending = manifest
        self.retry_pending()

    def retry_pending(self, *, last: bool = False) -> None:
        """Hands over a deferred version if the sender is free.

        With `last`, drops it if the sender is busy: the next step overwrites the weights.
        """
        if self._pending is None:
            return
        if isinstance(self._sender, ShardSender) and self._sender.busy:
            self._pending = None if last else self._pending
            return
        self.finish()

    def finish(self) -> None:
        """Hands over a deferred version; waits until the sender is free, at most for the deadline of a push."""
        manifest, self._pending = self._pending, None
        if manifest is None:
            return
        if isinstance(self._sender, ShardSender):
            hand_over_all_shards(self._trainer, self._sender, manifest)
        else:
            self._sender.publish(Weights(manifest=manifest, tensors=self._trainer.weights()))

    def resend_requested(self) -> bool:
        """Whether the last version must be published again, because it was lost or damaged."""
        return self._pending is None and self._sender.resend_requested()


def open_handover(stage: Stage, trainer: Trainer) -> Handover:
    """Opens the handover of new versions, in the generators' dtype."""
    config, arguments = stage.config, stage.arguments
    sender: HandoverSender | None = shard_sender(trainer, config, stage.store)
    if isinstance(sender, ShardSender):
        stage.log(f"weights go to the generators by {sender.route}")
    else:
        dtype = getattr(torch, config.generation_dtype)
        tensors = layout(trainer.model, trainer.ranks, dtype).tensors
        like = {spec.name: torch.empty(spec.shape, dtype=dtype, device="meta") for spec in tensors}
        sender = trainer_end(arguments.handover, like, config.generation.replicas)
    return Handover(trainer, sender)


def shard_sender(trainer: Trainer, config: RunConfig, store: Store) -> ShardSender | None:
    """Opens the sender of this rank's shards; None if versions are handed over whole."""
    if config.effective_weights.transport not in SHARDED:
        return None
    shards = layout(trainer.model, trainer.ranks, getattr(torch, config.generation_dtype))
    return rank_end(
        config.effective_weights,
        store,
        shards,
        trainer.ranks.rank,
        trainer.ranks.device,
        workers=vllm_workers(config),
        shared=config.placement.colocated,
    )
