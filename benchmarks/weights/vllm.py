"""How long vLLM can't generate while it gets new weights: a real engine, idle, with a random Llama.

version ─► receive buffer in shared memory ─► VllmEngine.update_weights: pause ─► load, repack ─► resume
                      floor: one copy of the same bytes, from memory to memory that exists already
"""

import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import median_ratio
from millrace.generation.engines.vllm.engine import VllmEngine
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.shared_tensors import ReceiveBuffer, shapes_of
from storage.stores.memory import memory_folder

_WARM_UP = 2
_ENGINE_ARGS = {
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "block_size": 32,
}


def measure_vllm(num_pushes: int) -> dict[str, Any]:
    """Seconds of a pause, median over the updates, and of one memcpy; the engine takes some 20 s to start."""
    model = _model()
    buffer = ReceiveBuffer(memory_folder() / f"benchmark-{uuid.uuid4().hex}")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        model.save_pretrained(folder)
        engine = VllmEngine(Path(folder), dtype="float32", stop_token_ids=[0], engine_args=_ENGINE_ARGS)
        try:
            rounds = [_round(engine, model, buffer, n) for n in range(1, 1 + _WARM_UP + num_pushes)][_WARM_UP:]
        finally:
            engine.close()
            buffer.close()
    pauses, copies = [pause for pause, _ in rounds], [copy for _, copy in rounds]
    return {
        "parameters": model.num_parameters(),
        "dtype": "float32",
        "bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "pause_seconds": statistics.median(pauses),
        "memcpy_seconds": statistics.median(copies),
        "pause_over_memcpy": median_ratio(pauses, copies),
        "all_seconds": {"pause": pauses, "memcpy": copies},
    }


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=11,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=64,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _round(engine: VllmEngine, model: LlamaForCausalLM, buffer: ReceiveBuffer, version: int) -> tuple[float, float]:
    """Seconds of the pause, and of one memcpy."""
    parameters = {name: parameter.neg_() for name, parameter in model.named_parameters()}
    tensors = buffer.tensors_for(shapes_of(parameters))
    for name, parameter in parameters.items():
        tensors[name].copy_(parameter)
    # Back again: the same bytes, to where they were.
    started = time.monotonic()
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
    copied = time.monotonic() - started
    manifest = Manifest(id=WeightsId(incarnation=0, policy_version=version, t_offered=time.time()))
    return engine.update_weights(Weights(manifest=manifest, tensors=tensors, shared=buffer.shared)), copied
