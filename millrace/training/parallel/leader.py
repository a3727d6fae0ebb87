"""Rank 0 leads and the other ranks follow: its trainer and checkpoints, whose methods run on all ranks.

    loop ─► LeaderTrainer, LeaderCheckpoints ──command, payload──► every other rank: `follow`
                    └─► its own share, at the same time: their collectives meet

    follow: receive ─► step, weights, … of the rank's own trainer ─► receive ─► … ─► END

Only rank 0 reads streams, hands weights over and commits. A trainer without other ranks needs none of this: `Trainer`
and `AsyncCheckpoints` have the same methods.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.checkpoints.reading import StoredFiles
from millrace.training.checkpoints.saving import AsyncCheckpoints, Tensors
from millrace.training.parallel.messages import Command, exchange, pack, receive, send, unpack
from millrace.training.parallel.ranks import Ranks
from millrace.training.parallel.sharding import full_tensors, own_shards
from millrace.training.step_report import StepReport
from millrace.training.trainer import Trainer
from millrace.weights.base import Manifest, Weights, WeightsSender
from storage.checkpoints import Checkpoint, CheckpointWriter
from storage.errors import StreamCorrupt
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.files import FileRef

_RATE_FACTOR = "<d"
"""Format of the factor of a step's learning rate, for `struct`."""


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

    def __init__(self, model: PreTrainedModel, training: TrainingConfig, **options: Any) -> None:
        super().__init__(model, training, **options)
        self.followers = Followers(self.ranks)

    def step(self, samples: Sequence[Sample], rate_factor: float = 1.0) -> StepReport:
        with self.followers.together(Command.STEP, struct.pack(_RATE_FACTOR, rate_factor) + pack(samples)):
            return super().step(samples, rate_factor)

    def weights(self) -> dict[str, torch.Tensor]:
        """`Trainer.weights` in the CPU's memory: a device never holds more than one whole tensor."""
        with self.followers.together(Command.WEIGHTS):
            return {name: tensor.cpu() for name, tensor in full_tensors(self.model)}

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        payload = json.dumps({"tokens": list(tokens), "most": most}).encode()
        with self.followers.together(Command.NEXT_LOGPROBS, payload):
            return super().next_logprobs(tokens, most)

    def sleep(self) -> None:
        """`Trainer.sleep` on all ranks; returns when all of them sleep."""
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
        # Raise an error of the last checkpoint before all ranks begin another.
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
    named = {
        "run": store.url,
        "step": checkpoint.step,
        "incarnation": checkpoint.incarnation,
        "files": {name: asdict(ref) for name, ref in checkpoint.files.items()},
    }
    with _on_all_ranks(trainer, Command.RESTORE, named):
        damage = _restore_share(trainer, store, checkpoint)
    if damage is not None:
        raise damage


def hand_over_all_shards(trainer: Trainer, sender: WeightsSender, manifest: Manifest) -> None:
    """Hands over the shards of every rank; `sender` is rank 0's."""
    with _on_all_ranks(trainer, Command.HAND_OVER, manifest.to_json()):
        hand_over(trainer, sender, manifest)


def _on_all_ranks(trainer: Trainer, command: Command, payload: object) -> AbstractContextManager[None]:
    """Commands the other ranks of `trainer`, if there are any; `payload` is sent as JSON."""
    if not isinstance(trainer, LeaderTrainer):
        return nullcontext()
    return trainer.followers.together(command, json.dumps(payload).encode())


def follow(trainer: Trainer, checkpoints: AsyncCheckpoints, sender: WeightsSender | None) -> None:
    """Follows rank 0 until it ends; `sender` takes this rank's shards, if they are handed over. Raises RuntimeError if
    rank 0 dies.

    Raises what this rank's share of the work raises. Rank 0 then meets the same error, or the loss of this rank.
    """
    trainer.before_update = checkpoints.wait_until_read
    while True:
        command, payload = receive()
        match command:
            case Command.END:
                return
            case Command.STEP:
                (rate_factor,) = struct.unpack_from(_RATE_FACTOR, payload)
                trainer.step(unpack(payload[struct.calcsize(_RATE_FACTOR) :]), rate_factor)
            case Command.WEIGHTS:
                # All ranks take part in gathering; only rank 0 uses the result.
                for _ in full_tensors(trainer.model):
                    pass
            case Command.NEXT_LOGPROBS:
                trainer.next_logprobs(**json.loads(payload))
            case Command.CHECKPOINT:
                checkpoints.begin(int(payload), trainer.tensors(), {})
            case Command.SLEEP:
                trainer.sleep()
                exchange("", trainer.ranks.size)
            case Command.WAKE:
                trainer.wake()
            case Command.HAND_OVER:
                assert sender is not None
                hand_over(trainer, sender, Manifest.from_json(json.loads(payload)))
            case Command.RESTORE:
                named = json.loads(payload)
                files = {name: FileRef(**ref) for name, ref in named["files"].items()}
                checkpoint = Checkpoint(step=named["step"], files=files, state={}, incarnation=named["incarnation"])
                _restore_share(trainer, open_store(named["run"]), checkpoint)


def hand_over(trainer: Trainer, sender: WeightsSender, manifest: Manifest) -> None:
    """Hands this rank's shards over; every rank has to call this."""
    sender.publish(Weights(manifest=manifest, tensors=dict(own_shards(trainer.model))))


def _restore_share(trainer: Trainer, store: Store, checkpoint: Checkpoint) -> StreamCorrupt | None:
    """Restores this rank's share of `checkpoint`; every rank has to call this.

    Returns the damage that any rank found, the same on all of them. After damage the ranks hold different policies
    until they have restored another checkpoint.
    """
    damage: StreamCorrupt | None = None
    try:
        trainer.restore(checkpoint.step, StoredFiles(store, checkpoint))
    except StreamCorrupt as error:
        damage = error
    mine = [] if damage is None else [damage.file, damage.reason]
    reports = [json.loads(text) for text in exchange(json.dumps(mine), trainer.ranks.size)]
    return next((StreamCorrupt(*report) for report in reports if report), None)
