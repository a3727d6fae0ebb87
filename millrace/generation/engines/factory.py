"""Which engine a run generates with."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.generation import GenerationConfig
from millrace.generation.engines.base import Engine
from millrace.generation.engines.transformers import TransformersEngine
from millrace.models.loading import load_model
from millrace.types import Sampling


def make_engine(
    config: GenerationConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str,
    samplings: Sequence[Sampling] = (),
    sleeps: bool = False,
    records_experts: bool = False,
    adapters: Mapping[str, Any] | None = None,
    on_progress: Callable[[], None] | None = None,
) -> Engine:
    """The configured engine with the model in `folder`, at policy version 0. Raises ModelFolderError.

    `samplings` are all that requests may have; vLLM prepares for them at its start. The other arguments are those of
    `TransformersEngine` and `VllmEngine`. Only the former records experts and calls `on_progress`: vLLM computes in
    other processes.
    """
    if config.engine == "vllm":
        # Importing vLLM takes seconds, and it need not be installed for a run without it.
        from millrace.generation.engines.vllm.engine import VllmEngine

        return VllmEngine(
            folder,
            dtype=dtype,
            stop_token_ids=[tokenizer.eos_token_id],
            engine_args=config.engine_args,
            reads_text=any(sampling.stop for sampling in samplings),
            sleeps=sleeps,
            truncates=any(sampling.truncates for sampling in samplings),
            keep_cache=config.keep_cache,
            adapters=adapters,
        )
    return TransformersEngine(
        load_model(folder, dtype),
        tokenizer,
        records_experts=records_experts,
        keep_cache=config.keep_cache,
        on_progress=on_progress,
    )
