"""Hands a version over from the trainer to sync_weights: whole, as a LoRA adapter, or as shards by each rank.

version ─► whole, or A and B: gathered from all ranks, copied to shared memory by rank 0
        └► shards: every rank takes a snapshot of its shards and sends them itself (millrace/weights/direct)
"""

import dataclasses

import torch

from configs.operation import SHARDED, vllm_workers
from configs.schema import RunConfig
from millrace.runtime.stage import Stage
from millrace.training.lora import described
from millrace.training.parallel.leader import hand_over_all_shards
from millrace.training.parallel.sharding import layout
from millrace.training.trainer import Trainer
from millrace.weights.adapter import Adapter
from millrace.weights.base import HandoverSender, Manifest, Weights
from millrace.weights.direct.sender import ShardSender
from millrace.weights.factory import finder, trainer_end
from storage.stores.base import Store


class Handover:
    """Rank 0's end. `sender` takes whole versions, the versions of `adapter`, or rank 0's shards.

    If the previous push is still reading the shards, the version is deferred. It is retried between steps, and dropped
    if the push is still reading when the next step begins. After the last step, it waits for the push.
    """

    def __init__(self, trainer: Trainer, sender: HandoverSender, adapter: Adapter | None = None) -> None:
        self._trainer = trainer
        self._sender = sender
        self._adapter = adapter
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
            return
        tensors = self._trainer.weights() if self._adapter is None else self._trainer.adapter()
        manifest = dataclasses.replace(manifest, adapter=self._adapter)
        self._sender.publish(Weights(manifest=manifest, tensors=tensors))

    def resend_requested(self) -> bool:
        """Whether the last version must be published again, because it was lost or damaged."""
        return self._pending is None and self._sender.resend_requested()


def open_handover(stage: Stage, trainer: Trainer) -> Handover:
    """Opens the handover of new versions: whole ones and shards in the generators' dtype, adapters in float32."""
    config, arguments = stage.config, stage.arguments
    sender = shard_sender(trainer, config, stage.store)
    if isinstance(sender, ShardSender):
        stage.log(f"weights go to the generators by {sender.route}")
        return Handover(trainer, sender)
    dtype = getattr(torch, config.generation_dtype)
    tensors = layout(trainer.model, trainer.ranks, dtype).tensors
    like = {spec.name: torch.empty(spec.shape, dtype=dtype, device="meta") for spec in tensors}
    adapter = None
    if config.sends_adapters:
        adapter = described(config.training)
        shapes = adapter.shapes({name: tensor.shape for name, tensor in like.items()})
        like = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return Handover(trainer, trainer_end(arguments.handover, like, config.generation.replicas), adapter)


def shard_sender(trainer: Trainer, config: RunConfig, store: Store) -> ShardSender | None:
    """Opens the sender of this rank's shards; None if versions are handed over whole."""
    weights, ranks = config.effective_weights, trainer.ranks
    if weights.transport not in SHARDED:
        return None
    return ShardSender(
        finder(store),
        layout(trainer.model, ranks, getattr(torch, config.generation_dtype)),
        ranks.rank,
        device=ranks.device,
        deadline_seconds=weights.deadline_seconds,
        transport=weights.transport,
        workers=vllm_workers(config),
        shared=config.placement.colocated,
    )
