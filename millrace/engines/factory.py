"""Which engine a run generates with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from millrace.engines.base import Engine
from millrace.engines.transformers import TransformersEngine
from millrace.model import load_model


def make_engine(
    name: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str,
    engine_args: Mapping[str, Any],
    stop: Sequence[str] = (),
    sleeps: bool = False,
) -> Engine:
    """The engine called `name` with the model in `folder`, at policy version 0. Raises ModelFolderError.

    `stop` are texts that end a response, beside the end-of-sequence token; `sleeps`: it is to be put to sleep.
    """
    if name == "vllm":
        # Late: importing vLLM takes seconds, and a run without it may not have it.
        from millrace.engines.vllm import VllmEngine

        return VllmEngine(
            folder,
            dtype=dtype,
            eos_token_id=tokenizer.eos_token_id,
            engine_args=engine_args,
            stop=stop,
            sleeps=sleeps,
        )
    return TransformersEngine(load_model(folder, dtype), tokenizer, stop=stop)
