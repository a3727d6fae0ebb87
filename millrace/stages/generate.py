"""The generate stage: prompts in, trajectories with their behaviour policy's log-probabilities out.

    model, prompts and environment of each source ─► encoders, engine ─► the loop (`generate_loop.py`)

Generator g of G generates the groups n with n mod G = g, and
resumes from its stream (`rollouts/group_sequence.py`).
"""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from configs.sources import naming_source
from millrace.generation.engines.base import Engine
from millrace.generation.engines.factory import make_engine
from millrace.generation.engines.no_model import NoModel
from millrace.generation.environments.episodes import EpisodeRules, Episodes, load_rules, sampling_of
from millrace.models.start_folder import start_folder
from millrace.profiling.recorder import profiled
from millrace.prompts.dataset import load_all_prompts
from millrace.rollouts.writer import TrajectoryWriter
from millrace.runtime.device_sharing import Device, DeviceTurns
from millrace.runtime.entry import run_stage
from millrace.runtime.stage import Stage
from millrace.stages.admission import Admission, prompt_order
from millrace.stages.carry_over import CarryOver
from millrace.stages.generate_loop import Generator
from millrace.types import Sampling
from millrace.weights.factory import generator_end


def main(stage: Stage) -> None:
    """Generates until asked to drain."""
    config = stage.config
    generation = config.generation
    torch.set_num_threads(generation.num_threads)
    device = Device(stage.arguments.handover / "device" if config.placement.colocated else None, alone=False)
    if device.shared and not stage.wait(device.take, why="waiting for the trainer to give the device back"):
        return
    started = time.monotonic()
    with stage.loading():
        folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
        prompts = load_all_prompts(config.by_source())
        rules: dict[str, EpisodeRules] = {}
        for name, source in config.by_source().items():
            with naming_source(name):
                of_source = load_rules(folder, config.model, source.prompts, source.environment, prompts[name])
                rules[name] = replace(of_source, demonstrates=source.prompts.demonstrations)
        sampling = {name: sampling_of(source.generation) for name, source in config.by_source().items()}
        engine = _engine(stage, folder, rules, sampling)
        order = prompt_order(stage, {name: of_prompts.train for name, of_prompts in prompts.items()})
    reader = generator_end(config.effective_weights, stage.store, stage.arguments.handover, stage.replica)
    group_sizes = {source.generation.group_size for source in config.by_source().values()}
    writer = TrajectoryWriter(
        stage.store,
        stage.replica,
        sampling,
        config.storage,
        vocab_size=engine.vocab_size,
        group_size=group_sizes.pop() if len(group_sizes) == 1 else 0,
        num_generators=generation.replicas,
    )
    stage.mark_ready(
        f"generator {stage.replica} ready after {writer.rows} trajectories (epoch {writer.epoch}), "
        f"loaded in {time.monotonic() - started:.1f} s"
    )
    with closing(engine), closing(reader), writer:
        turns = DeviceTurns(stage, device, engine)
        admission = Admission(stage, order, {name: of_source.encoder for name, of_source in rules.items()})
        carry_over = CarryOver(stage, engine, admission, writer)
        generator = Generator(stage, engine, turns, admission, reader, writer, carry_over)
        with profiled(stage, config.generation_dtype):
            generator.run()
        unfinished = [] if generator.weights is None else carry_over.store(generator.weights.incarnation)
    stored = f"; stored {len(unfinished)} unfinished responses" if unfinished else ""
    stage.log(f"generator {stage.replica} drained after {writer.rows} trajectories{stored}")


def _engine(stage: Stage, folder: Path, rules: Mapping[str, EpisodeRules], sampling: Mapping[str, Sampling]) -> Engine:
    """The run's engine, playing by the rules of each source."""
    config = stage.config
    engine: Engine
    if all(of_source.demonstrates for of_source in rules.values()):
        engine = NoModel(folder)
    else:
        engine = make_engine(
            config.generation,
            folder,
            next(iter(rules.values())).encoder.tokenizer,
            dtype=config.generation_dtype,
            samplings=[rules[name].sampling_of_turns(of_source) for name, of_source in sampling.items()],
            sleeps=config.placement.colocated,
            records_experts=config.training.router_replay,
            adapters=config.vllm_adapter_arguments,
            on_progress=stage.advance,
        )

    def each_turn() -> None:
        # A trajectory of many turns may take long: each turn is progress.
        stage.awaits_engine = False
        stage.update_status()

    return Episodes(engine, rules, each_turn)


if __name__ == "__main__":
    run_stage("generate", main)
