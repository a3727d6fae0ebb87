"""An engine alone in its process: the first requests of a campaign, all submitted at once.

    python -m benchmarks.sleeping.engine_alone CONFIG OUTPUT --groups N [--update-every SECONDS]

CONFIG is the campaign's, as JSON. Readings of the engine's meter are written to OUTPUT, as JSON.
"""

import argparse
import json
import time
import uuid
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.sleeping.metered_engine import MeteredEngine, MeterReading
from benchmarks.sleeping.pace import SleepingPace
from configs.recipe import Recipe
from configs.schema import RunConfig
from millrace.bootstrap.tiny_model import character_tokenizer, tiny_llama
from millrace.generation.engines.factory import make_engine
from millrace.generation.environments.episodes import sampling_of
from millrace.models.loading import load_model, load_tokenizer
from millrace.prompts.dataset import PromptOrder, load_prompts
from millrace.types import Request
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.shared_tensors import ReceiveBuffer, shapes_of
from storage.stores.memory import memory_folder

_SHAPE = Recipe(hidden_size=256, num_layers=4, num_heads=4, intermediate_size=1024)
_SEPARATION = 16.0


def main() -> None:
    """Generates everything once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--update-every", type=float)
    arguments = parser.parse_args()
    config = RunConfig.model_validate(json.loads(arguments.config.read_text()))
    readings = generate(config, arguments.groups, arguments.update_every)
    arguments.output.write_text(json.dumps([asdict(reading) for reading in readings]))


def generate(config: RunConfig, num_groups: int, update_every: float | None) -> list[MeterReading]:
    """Returns readings from the requests of `num_groups` groups, with an update every `update_every` seconds."""
    generation, pace = config.generation, SleepingPace.from_environment()
    assert config.model.path is not None
    folder = Path(config.model.path)
    torch.set_num_threads(generation.num_threads)
    readings: list[MeterReading] = []
    sampling = sampling_of(generation)
    tokenizer, dtype = load_tokenizer(folder), config.generation_dtype
    engine = make_engine(generation, folder, tokenizer, dtype=dtype, samplings=[sampling])
    engine = MeteredEngine(engine, pace, readings.append)
    buffer = ReceiveBuffer(memory_folder() / f"benchmark-{uuid.uuid4().hex}")
    weights = _weights(folder, config.generation_dtype, buffer)
    waiting = _requests(config, folder, num_groups)
    # transformers would decode all that it has in one batch.
    slots = len(waiting) if generation.engine == "vllm" else pace.slots
    updated = time.monotonic()
    try:
        while waiting or engine.in_flight:
            free = slots - engine.in_flight
            if waiting and free:
                engine.submit(waiting[:free], sampling)
                del waiting[:free]
            engine.collect(0.1)
            if update_every is not None and time.monotonic() - updated >= update_every:
                updated = time.monotonic()
                engine.update_weights(weights)
    finally:
        engine.close()
        buffer.close()
    return readings


def _requests(config: RunConfig, folder: Path, num_groups: int) -> list[Request]:
    order = PromptOrder(load_prompts(config.prompts).train, seed=config.seed, shuffle=config.prompts.shuffle)
    tokenizer = load_tokenizer(folder)
    size = config.generation.group_size
    return [
        Request(
            group_id=group_id,
            sample_index=i,
            prompt_tokens=tuple(tokenizer(order.prompt_at(group_id).text)["input_ids"]),
            seed=group_id * size + i,
        )
        for group_id in range(num_groups)
        for i in range(size)
    ]


def _weights(folder: Path, dtype: str, buffer: ReceiveBuffer) -> Weights:
    """Returns the model's weights as a new version."""
    parameters = {name: parameter.detach() for name, parameter in load_model(folder, dtype).named_parameters()}
    tensors = buffer.tensors_for(shapes_of(parameters))
    for name, parameter in parameters.items():
        tensors[name].copy_(parameter)
    manifest = Manifest(id=WeightsId(incarnation=0, policy_version=1, t_offered=time.time()))
    return Weights(manifest=manifest, tensors=tensors, shared=buffer.shared)


def save_model(folder: Path, context: int) -> None:
    """Writes a small random policy that never ends a response, and its tokenizer; `context` is the longest text."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer(["0123456789+="])
    make_endless(tiny_llama(_SHAPE, tokenizer, context)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_endless(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Changes the model so that it never samples its end token. Its output layer must be its embedding.

    One feature, which no layer changes, separates that token from all others.
    """
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        embedding[:, 0] = _SEPARATION
        embedding[model.config.eos_token_id, 0] = -_SEPARATION
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[0] = 0.0
    return model


if __name__ == "__main__":
    main()
