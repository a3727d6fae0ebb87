"""The train stage: one process, or one per rank of `training.parallel`; rank 0 is the stage.

    rank 0      start model ─► trainer ─► newest checkpoint ─► `TrainLoop` of a campaign, or `ReplayLoop` of a replay
                                  ║                            ─► version + 1, …, checkpointed
    rank 1, …   start model ─► trainer ─► follow               command by command; see `millrace.training.parallel`

Rank 0 reads and writes all streams. The other ranks write only their shards of checkpoints and, with the transport
`direct`, send their shards of the weights.
"""

import json
import os
from pathlib import Path

import torch

from configs.schema import RunConfig
from millrace.forking import process_settings
from millrace.models.loading import load_tokenizer
from millrace.models.start_folder import start_folder
from millrace.preflight.memory import check_memory
from millrace.preflight.model import check_layout
from millrace.preflight.model_folder import read_shapes
from millrace.profiling.recorder import profiled
from millrace.prompts.dataset import load_prompts
from millrace.replay.results import read_spec
from millrace.runs.provenance import record_start_hashes
from millrace.runs.record import read_attempt
from millrace.runtime.arguments import StageArguments
from millrace.runtime.device_sharing import Device, DeviceTurns
from millrace.runtime.entry import run_follower, run_stage
from millrace.runtime.stage import Stage
from millrace.stages.train.handover import open_handover, shard_sender
from millrace.stages.train.train_loop import TrainLoop
from millrace.stages.train.train_state import open_train_state
from millrace.training.checkpoints.saving import AsyncCheckpoints
from millrace.training.parallel.leader import LeaderTrainer, follow
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer, load_trainer
from millrace.weights.probe import probe_tokens
from storage.stores.base import Store


def main(stage: Stage) -> None:
    """Runs a campaign's or a replay's loop to its end, or until asked to drain; then checkpoints the last version.

    Returns with nothing loaded if asked to drain while it waits for the device.
    """
    config = stage.config
    device = Device(stage.arguments.handover / "device" if config.placement.colocated else None, alone=True)
    # Before any rank uses the device: the other ranks wait for rank 0 in `Ranks.join`.
    if device.shared and not stage.wait(device.take, why="waiting for generators to give the device back"):
        return
    with stage.loading():
        folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
        record_start_hashes(stage.store, folder)
        tokenizer = load_tokenizer(folder)
        trainer = _start_trainer(config, folder)
    with open_train_state(stage, trainer) as state:
        if (spec := read_spec(stage.store)) is not None:
            # Imported late: a campaign needs no database to choose stored groups with.
            from millrace.stages.train.replay_loop import ReplayLoop

            ReplayLoop(state, spec).run()
            return
        stop_at_step = read_attempt(stage.store, stage.arguments.attempt).stop_at_step
        handover = open_handover(stage, trainer)
        first_source = next(iter(config.by_source().values()))
        first_prompt: list[int] = tokenizer(load_prompts(first_source.prompts).train[0].text)["input_ids"]
        probed = probe_tokens(first_prompt, first_source.generation.max_new_tokens)
        ranks = "" if trainer.ranks.size == 1 else f", {trainer.ranks.size} ranks"
        stage.mark_ready(
            f"trainer ready at version {trainer.policy_version} of {stop_at_step}, incarnation {state.incarnation}"
            f"{ranks}"
        )
        with profiled(stage, config.training.compute_dtype or config.model.dtype):
            TrainLoop(state, DeviceTurns(stage, device, trainer), handover, probed, stop_at_step).run()
    stage.log(f"trainer stopped at version {trainer.policy_version}, checkpointed")


def follow_main(arguments: StageArguments, config: RunConfig, store: Store) -> None:
    """The main function of every rank but rank 0; returns when rank 0 ends."""
    trainer = _start_trainer(config, start_folder(store, config.model.path, arguments.handover))
    with AsyncCheckpoints(store, trainer.ranks, None) as checkpoints:
        follow(trainer, checkpoints, shard_sender(trainer, config, store))
    trainer.ranks.leave()


def _start_trainer(config: RunConfig, folder: Path) -> Trainer:
    """This rank's trainer of the start model in `folder`.

    Raises InputError if model or host don't allow the configured layout of ranks.
    """
    training, hosts = config.effective_training, config.placement.train.hosts
    torch.set_num_threads(training.num_threads)
    if training.device == "cuda":
        use_expandable_segments()
    gpus = torch.cuda.device_count() if training.device == "cuda" else None
    check_layout(json.loads((folder / "config.json").read_text()), training.parallel, hosts=hosts, gpus=gpus)
    check_memory(folder, read_shapes(folder), training, hosts=hosts)
    ranks = Ranks.join(
        data=training.parallel.data,
        tensor=training.parallel.tensor,
        shard=training.parallel.shard,
        device=training.device,
        shrunk=hosts > 1,
    )
    return load_trainer(
        LeaderTrainer if ranks.size > 1 and ranks.rank == 0 else Trainer,
        folder,
        training,
        trainings=config.trainings(),
        dtype=config.model.dtype,
        generation_dtype=config.generation_dtype,
        seed=config.seed,
        ranks=ranks,
    )


def use_expandable_segments() -> None:
    """Has this process's CUDA memory grow in place, so that microbatches of other lengths leave no gaps in it.

    Not in the environment, which vLLM's processes have too: its sleep mode refuses it. A user's own settings stay.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


if __name__ == "__main__":
    rank = process_settings.tie_to_launcher()
    if rank == 0:
        run_stage("train", main)
    run_follower("train", rank, follow_main)
