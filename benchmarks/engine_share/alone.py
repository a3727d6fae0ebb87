"""The engine alone in its process: the first requests of a campaign, all given at once.

    python -m benchmarks.engine_share.alone CONFIG OUTPUT --groups N [--update-every SECONDS]

CONFIG is the campaign's, as JSON. Readings of the engine's meter are written to OUTPUT, as JSON.
"""

import argparse
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.engine_share.metered import MeteredEngine, Reading
from benchmarks.sleeping.pace import Pace
from configs.schema import RunConfig
from millrace.generation.engines.base import Engine
from millrace.generation.engines.factory import make_engine
from millrace.models.loading import load_model, load_tokenizer
from millrace.prompts.dataset import PromptOrder, load_prompts
from millrace.types import Request, Sampling
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.shared_tensors import ReceiveBuffer, shapes_of
from storage.stores.memory import memory_folder


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


def generate(config: RunConfig, num_groups: int, update_every: float | None) -> list[Reading]:
    """Readings while the requests of so many groups are generated, with updates to the same weights if asked."""
    generation, tail = config.generation, Pace.from_environment().long_tail
    assert tail is not None
    assert config.model.path is not None
    folder = Path(config.model.path)
    torch.set_num_threads(generation.threads)
    readings: list[Reading] = []
    engine = MeteredEngine(
        make_engine(generation, folder, load_tokenizer(folder), dtype=config.generation_dtype), tail, readings.append
    )
    buffer = ReceiveBuffer(memory_folder() / f"benchmark-{uuid.uuid4().hex}")
    weights = _weights(folder, config.generation_dtype, buffer)
    try:
        # transformers would decode all that it has in one batch.
        at_once = None if generation.engine == "vllm" else tail.places
        _run(engine, _requests(config, folder, num_groups), config, weights, update_every, at_once)
    finally:
        engine.close()
        buffer.close()
    return readings


def _run(
    engine: Engine,
    requests: Sequence[Request],
    config: RunConfig,
    weights: Weights,
    update_every: float | None,
    at_once: int | None,
) -> None:
    sampling = Sampling(
        temperature=config.generation.temperature,
        top_p=config.generation.top_p,
        top_k=config.generation.top_k,
        max_new_tokens=config.generation.max_new_tokens,
    )
    waiting = list(requests)
    updated = time.monotonic()
    while waiting or engine.in_flight:
        free = len(waiting) if at_once is None else at_once - engine.in_flight
        if waiting and free:
            engine.submit(waiting[:free], sampling)
            del waiting[:free]
        engine.collect(0.1)
        if update_every is not None and time.monotonic() - updated >= update_every:
            updated = time.monotonic()
            engine.update_weights(weights)


def _requests(config: RunConfig, folder: Path, num_groups: int) -> list[Request]:
    order = PromptOrder(load_prompts(config.prompts).train, seed=config.seed, shuffle=config.prompts.shuffle)
    tokenizer = load_tokenizer(folder)
    size = config.generation.group_size
    return [
        Request(
            group_id=group_id,
            sample_index=place,
            prompt_tokens=tuple(tokenizer(order.prompt_at(group_id).text)["input_ids"]),
            seed=group_id * size + place,
        )
        for group_id in range(num_groups)
        for place in range(size)
    ]


def _weights(folder: Path, dtype: str, buffer: ReceiveBuffer) -> Weights:
    """The model's own, as a version."""
    parameters = {name: parameter.detach() for name, parameter in load_model(folder, dtype).named_parameters()}
    tensors = buffer.tensors_for(shapes_of(parameters))
    for name, parameter in parameters.items():
        tensors[name].copy_(parameter)
    manifest = Manifest(id=WeightsId(incarnation=0, policy_version=1, t_offered=time.time()))
    return Weights(manifest=manifest, tensors=tensors, shared=buffer.shared)


if __name__ == "__main__":
    main()
