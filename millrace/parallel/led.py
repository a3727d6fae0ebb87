"""Rank 0 of several: what its loops ask of trainer and checkpoints, all ranks do, because it says so first.

    loop ─► LedTrainer, LedCheckpoints ──word, payload──► every other rank: `follow`
                    └─► its own share, at the same time: the collectives in there meet

Of a trainer that is alone none of this is needed: `Trainer` and `AsyncCheckpoints` themselves have the same methods.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from millrace.batch import Sample
from millrace.checkpointing.saving import AsyncCheckpoints, Tensors
from millrace.parallel.follow import restore_share, restoring
from millrace.parallel.ranks import Ranks
from millrace.parallel.sharding import full_tensors
from millrace.parallel.wire import Order, Word, exchange, pack, tell
from millrace.step_report import StepReport
from millrace.trainer import Trainer
from storage.checkpoints import Checkpoint, CheckpointWriter
from storage.store import Store


class Lead:
    """Rank 0's word to the others, which end with its `with` block."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # Whether the others may be at what they were told, rather than wait for the next word.
        self._amid = False

    @contextmanager
    def together(self, order: Order) -> Iterator[None]:
        """What all ranks do within, each its share. After an error in there nothing more can be said."""
        self._amid = True
        tell(order)
        yield
        self._amid = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Amid something, they fail at it as this rank did, or end with it.
        if not self._amid:
            tell(Order(word=Word.END))
            self.ranks.leave()


class LedTrainer(Trainer):
    """Rank 0's trainer. Takes what any trainer takes."""

    def __init__(self, model: PreTrainedModel, **how: Any) -> None:
        super().__init__(model, **how)
        self.lead = Lead(self.ranks)

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """As any trainer's."""
        with self.lead.together(Order(word=Word.STEP, payload=pack(samples))):
            return super().step(samples)

    def weights(self) -> dict[str, torch.Tensor]:
        """As any trainer's, in the CPU's memory: a device holds no more than one whole tensor at a time."""
        with self.lead.together(Order(word=Word.WEIGHTS)):
            return {name: tensor.cpu() for name, tensor in full_tensors(self.model)}

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        """As any trainer's."""
        payload = json.dumps({"tokens": list(tokens), "most": most}).encode()
        with self.lead.together(Order(word=Word.NEXT_LOGPROBS, payload=payload)):
            return super().next_logprobs(tokens, most)

    def sleep(self) -> None:
        """As any trainer's; on return all ranks sleep."""
        with self.lead.together(Order(word=Word.SLEEP)):
            super().sleep()
            exchange("", self.ranks.size)

    def wake(self) -> None:
        """As any trainer's."""
        with self.lead.together(Order(word=Word.WAKE)):
            super().wake()


class LedCheckpoints(AsyncCheckpoints):
    """Rank 0's checkpoints."""

    def __init__(self, store: Store, lead: Lead, writer: CheckpointWriter) -> None:
        super().__init__(store, lead.ranks, writer)
        self._lead = lead

    def begin(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """As of a trainer that is alone."""
        # What became of the one before is rank 0's to say, before all begin another.
        self.finish()
        with self._lead.together(Order(word=Word.CHECKPOINT, payload=str(step).encode())):
            super().begin(step, tensors, state)


@contextmanager
def checkpoints_of(trainer: Trainer, store: Store, writer: CheckpointWriter) -> Iterator[AsyncCheckpoints]:
    """Where the trainer of rank 0, or one that is alone, puts its checkpoints; with the block the other ranks end.

    Nothing may be asked of a `LedTrainer` before: the others come here first.
    """
    if isinstance(trainer, LedTrainer):
        with trainer.lead, LedCheckpoints(store, trainer.lead, writer) as led:
            yield led
    else:
        with AsyncCheckpoints(store, trainer.ranks, writer) as checkpoints:
            yield checkpoints


def restore(trainer: Trainer, store: Store, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint of the run in `store` into `trainer`, and into those of the other ranks if there are any.

    Raises StreamCorrupt where a rank finds damage; another checkpoint has to be restored then. Raises WeightsMismatch
    where it is of another model.
    """
    if isinstance(trainer, LedTrainer):
        with trainer.lead.together(restoring(store, checkpoint)):
            damage = restore_share(trainer, store, checkpoint)
    else:
        damage = restore_share(trainer, store, checkpoint)
    if damage is not None:
        raise damage
