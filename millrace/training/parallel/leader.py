"""Rank 0 leads and the other ranks follow: its trainer and checkpoints, whose methods run on all ranks.

    loop ─► LeaderTrainer, TrainerCheckpoints ──command──► every other rank: `follow`
                    └─► its own share, at the same time: their collectives meet

    follow: receive ─► step, weights, … of the rank's own trainer ─► receive ─► … ─► end

Only rank 0 reads streams, hands weights over and commits. With one rank no commands are sent.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any, Self

import torch

from millrace.training.batch import Sample
from millrace.training.checkpoints.reading import StoredFiles
from millrace.training.checkpoints.saving import AsyncCheckpoints, Tensors
from millrace.training.parallel.messages import exchange, pack, receive, send, unpack
from millrace.training.parallel.sharding import adapter_tensors, base_tensors
from millrace.training.step_report import StepReport
from millrace.training.trainer import Trainer
from millrace.weights.base import Manifest, Weights, WeightsSender
from storage.checkpoints import Checkpoint, CheckpointWriter
from storage.errors import StreamCorrupt
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.files import FileRef


class LeaderTrainer(Trainer):
    """Rank 0's trainer, which commands the other ranks; they end with its `with` block."""

    _busy = False
    """Whether the other ranks may still be busy with a command, and so not waiting for the next one."""

    @contextmanager
    def together(self, command: str, payload: bytes = b"", **arguments: Any) -> Iterator[None]:
        """All ranks do this: the others on command, rank 0 in the block. After an error no command can follow."""
        self._busy = True
        send(command, payload, **arguments)
        yield
        self._busy = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Busy ranks fail at their command as this rank did, or are ended by the launcher.
        if not self._busy:
            send("end")
            self.ranks.leave()

    def warm_up(self) -> None:
        with self.together("warm_up"):
            super().warm_up()

    def step(self, samples: Sequence[Sample], rate_factor: float = 1.0) -> StepReport:
        with self.together("step", pack(samples), rate_factor=rate_factor):
            return super().step(samples, rate_factor)

    def weights(self) -> dict[str, torch.Tensor]:
        """`Trainer.weights` in the CPU's memory: a device never holds more than one whole tensor."""
        with self.together("weights"):
            return {name: tensor.cpu() for name, tensor in base_tensors(self.model, whole=True)}

    def adapter(self) -> dict[str, torch.Tensor]:
        """`Trainer.adapter` in the CPU's memory."""
        with self.together("adapter"):
            return {name: tensor.cpu() for name, tensor in adapter_tensors(self.model)}

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        with self.together("next_logprobs", tokens=list(tokens), most=most):
            return super().next_logprobs(tokens, most)

    def sleep(self) -> None:
        """`Trainer.sleep` on all ranks; returns when all of them sleep."""
        with self.together("sleep"):
            super().sleep()
            exchange("", self.ranks.size)

    def wake(self) -> None:
        with self.together("wake"):
            super().wake()


class TrainerCheckpoints(AsyncCheckpoints):
    """The checkpoints of rank 0's trainer, or of one without other ranks."""

    def __init__(self, trainer: Trainer, store: Store, writer: CheckpointWriter) -> None:
        super().__init__(store, trainer.ranks, writer)
        self._trainer = trainer

    def begin(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        # Raise an error of the last checkpoint before all ranks begin another.
        self.finish()
        with _on_all_ranks(self._trainer, "checkpoint", step=step):
            super().begin(step, tensors, state)


@contextmanager
def checkpoints_of(trainer: Trainer, store: Store, writer: CheckpointWriter) -> Iterator[AsyncCheckpoints]:
    """Opens the checkpoints of rank 0's trainer, or of one without other ranks; the other ranks end with the block.

    Call no method of a `LeaderTrainer` before this: the other ranks come here first.
    """
    leader = trainer if isinstance(trainer, LeaderTrainer) else nullcontext()
    with leader, TrainerCheckpoints(trainer, store, writer) as checkpoints:
        yield checkpoints


def restore(trainer: Trainer, store: Store, checkpoint: Checkpoint) -> None:
    """Restores a checkpoint of the run in `store` on all ranks.

    Raises StreamCorrupt if a rank finds damage; another checkpoint has to be restored then. Raises WeightsMismatch if
    it belongs to another model.
    """
    with _on_all_ranks(trainer, "restore", run=store.url, checkpoint=asdict(replace(checkpoint, state={}))):
        damage = _restore_share(trainer, store, checkpoint)
    if damage is not None:
        raise damage


def hand_over_all_shards(trainer: Trainer, sender: WeightsSender, manifest: Manifest) -> None:
    """Hands over the shards of every rank; `sender` is rank 0's."""
    with _on_all_ranks(trainer, "hand_over", manifest=manifest.to_json()):
        hand_over(trainer, sender, manifest)


def _on_all_ranks(trainer: Trainer, command: str, **arguments: Any) -> AbstractContextManager[None]:
    """Commands the other ranks of `trainer`, if there are any."""
    return trainer.together(command, **arguments) if isinstance(trainer, LeaderTrainer) else nullcontext()


def follow(trainer: Trainer, checkpoints: AsyncCheckpoints, sender: WeightsSender | None) -> None:
    """Follows rank 0 until it ends. `sender` takes this rank's shards, if they are handed over.

    Raises RuntimeError if rank 0 dies, and what this rank's share of the work raises. Rank 0 then meets the same error,
    or the loss of this rank.
    """
    while True:
        command, arguments, payload = receive()
        match command:
            case "end":
                return
            case "warm_up":
                trainer.warm_up()
            case "step":
                trainer.step(unpack(payload), **arguments)
            case "weights":
                # All ranks take part in gathering; only rank 0 uses the result.
                for _ in base_tensors(trainer.model, whole=True):
                    pass
            case "adapter":
                trainer.adapter()
            case "next_logprobs":
                trainer.next_logprobs(**arguments)
            case "checkpoint":
                checkpoints.begin(arguments["step"], trainer.tensors(), {})
            case "sleep":
                trainer.sleep()
                exchange("", trainer.ranks.size)
            case "wake":
                trainer.wake()
            case "hand_over":
                assert sender is not None
                hand_over(trainer, sender, Manifest.from_json(arguments["manifest"]))
            case "restore":
                described = arguments["checkpoint"]
                files = {name: FileRef(**ref) for name, ref in described["files"].items()}
                _restore_share(trainer, open_store(arguments["run"]), Checkpoint(**{**described, "files": files}))
            case _:
                raise ValueError(f"rank 0 sent an unknown command: {command}")


def hand_over(trainer: Trainer, sender: WeightsSender, manifest: Manifest) -> None:
    """Hands this rank's shards over; every rank has to call this."""
    sender.publish(Weights(manifest=manifest, tensors=dict(base_tensors(trainer.model, whole=False))))


def _restore_share(trainer: Trainer, store: Store, checkpoint: Checkpoint) -> StreamCorrupt | None:
    """Restores this rank's share of `checkpoint`; every rank has to call this.

    Returns the damage that any rank found, the same on all of them. After damage the ranks hold different policies
    until they have restored another checkpoint.
    """
    report: list[str] = []
    try:
        trainer.restore(checkpoint.step, StoredFiles(store, checkpoint))
    except StreamCorrupt as error:
        report = [error.file, error.reason]
    reports = [json.loads(text) for text in exchange(json.dumps(report), trainer.ranks.size)]
    return next((StreamCorrupt(*damage) for damage in reports if damage), None)
