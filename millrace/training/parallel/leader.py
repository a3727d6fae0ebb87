"""Rank 0 of several: its trainer and checkpoints, whose methods run on all ranks.

    loop ─► LeaderTrainer, LeaderCheckpoints ──command, payload──► every other rank: `follow`
                    └─► its own share, at the same time: their collectives meet

A trainer without other ranks needs none of this: `Trainer` and `AsyncCheckpoints` have the same methods.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.checkpoints.saving import AsyncCheckpoints, Tensors
from millrace.training.parallel.follower import checkpoint_payload, restore_share
from millrace.training.parallel.messages import RATE_FACTOR, Command, exchange, pack, send
from millrace.training.parallel.ranks import Ranks
from millrace.training.parallel.sharding import full_tensors
from millrace.training.step_report import StepReport
from millrace.training.trainer import Trainer
from storage.checkpoints import Checkpoint, CheckpointWriter
from storage.stores.base import Store


class Followers:
    """The other ranks, as rank 0 commands them; they end with its `with` block."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # Whether they may still be busy with a command, and so not waiting for the next one.
        self._busy = False

    @contextmanager
    def together(self, command: Command, payload: bytes = b"") -> Iterator[None]:
        """All ranks do this: the others on command, rank 0 in the block. After an error no command can follow."""
        self._busy = True
        send(command, payload)
        yield
        self._busy = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Busy ranks fail at their command as this rank did, or are ended by the launcher.
        if not self._busy:
            send(Command.END)
            self.ranks.leave()


class LeaderTrainer(Trainer):
    """Rank 0's trainer; takes the arguments of `Trainer`."""

    def __init__(self, model: PreTrainedModel, training: TrainingConfig, **others: Any) -> None:
        super().__init__(model, training, **others)
        self.followers = Followers(self.ranks)

    def step(self, samples: Sequence[Sample], rate_factor: float = 1.0) -> StepReport:
        with self.followers.together(Command.STEP, struct.pack(RATE_FACTOR, rate_factor) + pack(samples)):
            return super().step(samples, rate_factor)

    def weights(self) -> dict[str, torch.Tensor]:
        """As in `Trainer`, but in the CPU's memory: a device never holds more than one whole tensor."""
        with self.followers.together(Command.WEIGHTS):
            return {name: tensor.cpu() for name, tensor in full_tensors(self.model)}

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        payload = json.dumps({"tokens": list(tokens), "most": most}).encode()
        with self.followers.together(Command.NEXT_LOGPROBS, payload):
            return super().next_logprobs(tokens, most)

    def sleep(self) -> None:
        """As in `Trainer`; on return all ranks sleep."""
        with self.followers.together(Command.SLEEP):
            super().sleep()
            exchange("", self.ranks.size)

    def wake(self) -> None:
        with self.followers.together(Command.WAKE):
            super().wake()


class LeaderCheckpoints(AsyncCheckpoints):
    """Rank 0's checkpoints."""

    def __init__(self, store: Store, followers: Followers, writer: CheckpointWriter) -> None:
        super().__init__(store, followers.ranks, writer)
        self._followers = followers

    def begin(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        # Raise what went wrong with the last checkpoint before all ranks begin another.
        self.finish()
        with self._followers.together(Command.CHECKPOINT, str(step).encode()):
            super().begin(step, tensors, state)


@contextmanager
def checkpoints_of(trainer: Trainer, store: Store, writer: CheckpointWriter) -> Iterator[AsyncCheckpoints]:
    """The checkpoints of rank 0's trainer, or of one without other ranks; the other ranks end with the block.

    Call no method of a `LeaderTrainer` before this: the other ranks come here first.
    """
    if isinstance(trainer, LeaderTrainer):
        with trainer.followers, LeaderCheckpoints(store, trainer.followers, writer) as checkpoints:
            trainer.before_update = checkpoints.wait_until_read
            yield checkpoints
    else:
        with AsyncCheckpoints(store, trainer.ranks, writer) as checkpoints:
            trainer.before_update = checkpoints.wait_until_read
            yield checkpoints


def restore(trainer: Trainer, store: Store, checkpoint: Checkpoint) -> None:
    """Restores a checkpoint of the run in `store` on all ranks.

    Raises StreamCorrupt if a rank finds damage; another checkpoint has to be restored then. Raises WeightsMismatch if
    it belongs to another model.
    """
    if isinstance(trainer, LeaderTrainer):
        with trainer.followers.together(Command.RESTORE, checkpoint_payload(store, checkpoint)):
            damage = restore_share(trainer, store, checkpoint)
    else:
        damage = restore_share(trainer, store, checkpoint)
    if damage is not None:
        raise damage
