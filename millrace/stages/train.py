"""The train stage: one process, or as many ranks as `training.parallel` says, of which rank 0 is the stage.

    rank 0      start model ─► trainer ─► newest checkpoint ─► a campaign's loop (`train_live`), or a replay's
                                  ║                            (`train_stored`) ─► version + 1, …, checkpointed
    rank 1, …   start model ─► trainer ─► follow                word by word; see `millrace.parallel`

Rank 0 alone reads streams and writes what is not a shard; it speaks for all.
"""

from contextlib import closing
from pathlib import Path

import torch

from configs.schema import RunConfig
from millrace.checkpointing.saving import AsyncCheckpoints
from millrace.consumed import ConsumedWriter
from millrace.device import open_device
from millrace.model import load_model, load_tokenizer, start_folder
from millrace.parallel import tether
from millrace.parallel.follow import follow
from millrace.parallel.layout import check_layout
from millrace.parallel.led import LedTrainer, checkpoints_of, restore
from millrace.parallel.ranks import Ranks
from millrace.probe import probe_tokens
from millrace.replay.spec import read_spec
from millrace.run import read_attempt
from millrace.stages.arguments import StageArguments
from millrace.stages.inputs import load_prompt_set
from millrace.stages.process import Stage, run_follower, run_stage
from millrace.stages.train_live import TrainLoop
from millrace.stages.train_stored import StoredLoop
from millrace.stages.turns import Turns
from millrace.start_hashes import record_start_hashes
from millrace.trainer import Trainer
from millrace.weights.base import WeightsWriter
from millrace.weights.factory import trainer_end
from storage.checkpoints import Checkpoint, CheckpointWriter, checkpoints_backwards
from storage.errors import StreamCorrupt
from storage.store import Store


def main(stage: Stage) -> None:
    """Trains to the attempt's last step, or until asked to drain; the last version is checkpointed either way."""
    config = stage.config
    device = open_device(stage.arguments.handover, colocated=config.placement.colocated, alone=True)
    # Before any rank has put anything there: the others wait for rank 0 where they all meet.
    if device.shared and not stage.wait(device.take, why="waiting for generators to give the device back"):
        return
    with stage.loading():
        folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
        record_start_hashes(stage.store, folder)
        tokenizer = load_tokenizer(folder)
        trainer = load_trainer(config, folder)
    writer = CheckpointWriter(stage.store)
    with (
        checkpoints_of(trainer, stage.store, writer) as checkpoints,
        closing(ConsumedWriter(stage.store, writer.incarnation)) as consumed,
    ):
        found = restore_newest(stage, trainer)
        if (spec := read_spec(stage.store)) is not None:
            StoredLoop(stage, spec, trainer, writer, checkpoints, consumed, found).run()
            return
        stop_at_step = read_attempt(stage.store, stage.arguments.attempt).stop_at_step
        handover = _handover(stage, trainer)
        first_prompt: list[int] = tokenizer(load_prompt_set(config).train[0].text)["input_ids"]
        probed = probe_tokens(first_prompt, config.generation.max_new_tokens)
        spread = "" if trainer.ranks.size == 1 else f", {trainer.ranks.size} ranks"
        stage.ready(
            f"trainer ready at version {trainer.policy_version} of {stop_at_step}, incarnation {writer.incarnation}"
            f"{spread}"
        )
        turns = Turns(stage, device, trainer)
        TrainLoop(stage, trainer, turns, writer, checkpoints, consumed, handover, probed, found, stop_at_step).run()
    stage.milestone(f"trainer stopped at version {trainer.policy_version}, checkpointed")


def follow_main(arguments: StageArguments, config: RunConfig, store: Store) -> None:
    """What every rank but rank 0 does, until that has ended."""
    trainer = load_trainer(config, start_folder(store, config.model.path, arguments.handover))
    with AsyncCheckpoints(store, trainer.ranks, None) as checkpoints:
        follow(trainer, checkpoints)
    trainer.ranks.leave()


def load_trainer(config: RunConfig, folder: Path) -> Trainer:
    """This rank's trainer of the start model in `folder`, spread as the config says.

    Raises InputError where model or host don't allow that.
    """
    training = config.training
    torch.set_num_threads(training.threads)
    # The same on every rank: so are the adapters that are drawn.
    torch.manual_seed(config.seed)
    model = load_model(folder, config.model.dtype)
    reference = load_model(folder, config.model.dtype) if training.kl.coefficient else None
    gpus = torch.cuda.device_count() if training.device == "cuda" else None
    check_layout(model.config.to_dict(), training.parallel, gpus=gpus)
    ranks = Ranks.join(data=training.parallel.data, tensor=training.parallel.tensor, device=training.device)
    kind = LedTrainer if ranks.size > 1 and ranks.rank == 0 else Trainer
    return kind.configured(model, config, reference=reference, ranks=ranks)


def _handover(stage: Stage, trainer: Trainer) -> WeightsWriter:
    """As generators want the weights: the copy into the handover casts."""
    dtype = getattr(torch, stage.config.generation_dtype)
    like = {name: torch.empty_like(tensor, dtype=dtype, device="meta") for name, tensor in trainer.weights().items()}
    return trainer_end(stage.arguments.handover, like, stage.config.generation.replicas)


def restore_newest(stage: Stage, trainer: Trainer) -> Checkpoint | None:
    """Puts the newest checkpoint that can be read into `trainer` and returns it; None where the run has none yet.

    Raises StreamCorrupt, of the newest, where there are checkpoints and none can be read.
    """
    damage: StreamCorrupt | None = None
    for checkpoint in checkpoints_backwards(stage.store):
        try:
            restore(trainer, stage.store, checkpoint)
        except StreamCorrupt as error:
            stage.milestone(f"checkpoint of version {checkpoint.step} set aside, going back to the one before: {error}")
            damage = damage or error
            continue
        return checkpoint
    if damage is not None:
        raise damage
    return None


if __name__ == "__main__":
    rank = tether.tie()
    if rank == 0:
        run_stage("train", main)
    run_follower("train", rank, follow_main)
