"""The generate stage: prompts in, trajectories with their behaviour policy's log-probabilities out.

    model, prompts ─► encoder ─► engine, with the environment if there is one ─► the loop (`generate_loop.py`)

Generator g of G generates the groups n with n mod G = g, and
resumes from its stream (`rollouts/group_sequence.py`).
"""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from millrace.chat.encoder import PromptEncoder
from millrace.generation.engines.base import Engine
from millrace.generation.engines.factory import make_engine
from millrace.generation.environments.base import AnyEnvironment, environment_class
from millrace.generation.environments.episodes import in_environment, prompt_encoder, sampling_of
from millrace.models.start_folder import start_folder
from millrace.prompts.dataset import load_prompts
from millrace.rollouts.writer import TrajectoryWriter
from millrace.runtime.device_sharing import Device, DeviceTurns
from millrace.runtime.stage import Stage, run_stage
from millrace.stages.admission import Admission, prompt_order
from millrace.stages.carry_over import CarryOver
from millrace.stages.generate_loop import Generator
from millrace.weights.factory import generator_end


def main(stage: Stage) -> None:
    """Generates until asked to drain."""
    config = stage.config
    generation = config.generation
    torch.set_num_threads(generation.threads)
    device = Device(stage.arguments.handover / "device" if config.placement.colocated else None, alone=False)
    if device.shared and not stage.wait(device.take, why="waiting for the trainer to give the device back"):
        return
    started = time.monotonic()
    with stage.loading():
        folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
        prompts = load_prompts(config.prompts)
        environment = environment_class(config.environment.name)
        encoder = prompt_encoder(folder, config.model, config.prompts, prompts, environment)
        engine = _engine(stage, folder, encoder, environment)
        order = prompt_order(stage, prompts.train)
    reader = generator_end(config.effective_weights, stage.store, stage.arguments.handover, stage.replica)
    writer = TrajectoryWriter(
        stage.store,
        stage.replica,
        sampling_of(generation),
        config.storage,
        vocab_size=engine.vocab_size,
        group_size=generation.group_size,
        num_generators=generation.replicas,
    )
    stage.mark_ready(
        f"generator {stage.replica} ready after {writer.rows} trajectories (epoch {writer.epoch}), "
        f"{generation.engine} started in {time.monotonic() - started:.1f} s"
    )
    with closing(engine), closing(reader), writer:
        turns = DeviceTurns(stage, device, engine)
        admission = Admission(stage, order, encoder)
        carry_over = CarryOver(stage, engine, admission, writer)
        generator = Generator(stage, engine, turns, admission, reader, writer, carry_over)
        generator.run()
        unfinished = [] if generator.weights is None else carry_over.store(generator.weights.incarnation)
    stored = f"; stored {len(unfinished)} unfinished responses" if unfinished else ""
    stage.log(f"generator {stage.replica} drained after {writer.rows} trajectories{stored}")


def _engine(stage: Stage, folder: Path, encoder: PromptEncoder, environment: type[AnyEnvironment] | None) -> Engine:
    """The run's engine, playing its environment if it has one."""
    config = stage.config

    def engine(stop: Sequence[str]) -> Engine:
        return make_engine(
            config.generation,
            folder,
            encoder.tokenizer,
            dtype=config.generation_dtype,
            stop=stop,
            stop_token_ids=encoder.stop_token_ids,
            sleeps=config.placement.colocated,
            records_experts=config.training.router_replay,
            adapters=config.vllm_adapter_arguments,
            on_progress=stage.advance,
        )

    def each_turn() -> None:
        # A trajectory of many turns may take long: each turn is progress.
        stage.awaits_engine = False
        stage.update_status()

    max_turns = config.environment.max_turns
    return in_environment(engine, environment, encoder, max_turns=max_turns, each_turn=each_turn)


if __name__ == "__main__":
    run_stage("generate", main)
