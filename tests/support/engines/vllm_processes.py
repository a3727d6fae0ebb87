"""vLLM started for tests: small, with one thread in each of its processes, and gone with all of them at the end."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from transformers import PreTrainedModel

from millrace.generation.engines.vllm.startup import is_alive

if TYPE_CHECKING:
    from millrace.generation.engines.vllm.engine import VllmEngine

HIDDEN_SIZE = 64
"""Two attention heads of 32 features, the fewest that vLLM's attention on a CPU knows."""
BLOCK_SIZE = 32
"""Tokens of a block of its key-value cache: a prefix is cached in whole blocks only."""
ENGINE_ARGS: dict[str, Any] = {
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 256,
    "block_size": BLOCK_SIZE,
}


@contextmanager
def running_vllm(
    model: PreTrainedModel,
    folder: Path,
    reads_text: bool = False,
    dtype: str = "float32",
    adapters: Mapping[str, Any] | None = None,
    **engine_args: Any,
) -> Iterator["VllmEngine"]:
    """The engine with this model, whose files are put into `folder`. It takes some 20 seconds to start.

    If it `reads_text`, to stop at some, `folder` must hold the tokenizer.
    """
    # Late: only the tests marked `vllm` need it, and it takes seconds to import.
    from millrace.generation.engines.vllm.engine import VllmEngine

    model.save_pretrained(folder)
    # vLLM puts a lot into the environment for its children: not for those of other tests.
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        engine = VllmEngine(
            folder,
            dtype=dtype,
            stop_token_ids=[model.config.eos_token_id],
            engine_args={**ENGINE_ARGS, **engine_args},
            reads_text=reads_text,
            adapters=adapters,
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        yield engine
    finally:
        engine.close()


def engine_core(processes: set[psutil.Process]) -> psutil.Process:
    """The one of an engine's processes that schedules; its workers are its children."""
    (core,) = (process for process in processes if process.name().startswith("VLLM::EngineC"))
    return core


def left_behind(processes: set[psutil.Process]) -> set[psutil.Process]:
    """The processes that are still alive after ten seconds."""
    deadline = time.monotonic() + 10
    while (alive := {process for process in processes if is_alive(process)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive
