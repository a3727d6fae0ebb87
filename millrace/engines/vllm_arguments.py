"""How Millrace starts vLLM: the arguments and the environment. Light: vLLM itself is not imported."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_DEFAULTS: dict[str, Any] = {"disable_log_stats": True}
# vLLM 0.32's engine core on a CPU dies of a seeded request whose prompt is computed in pieces: it turns the request's
# generator back after each piece (`set_offset` in v1/worker/gpu_model_runner.py), which a CPU's generator can't.
_ON_A_CPU: dict[str, Any] = {"enable_chunked_prefill": False}

# By itself vLLM would take nearly all memory of the machine for it.
_CACHE_ON_A_CPU = 2**30


def vllm_arguments(
    folder: Path, *, dtype: str, engine_args: Mapping[str, Any], reads_text: bool = False, sleeps: bool = False
) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs` for the model in `folder`.

    `reads_text`: it is to stop at texts; `sleeps`: it is to give its device back from time to time.

    `engine_args` are the user's. Those that Millrace's promises rest on can't be among them: log-probabilities after
    temperature and top-p, a prefix cache that weight updates clear, token ids in and out.
    """
    defaults = dict(_DEFAULTS)
    # Counting devices starts no CUDA; a build of torch for CPUs counts none.
    if not torch.cuda.device_count():
        defaults |= _ON_A_CPU
        if "gpu_memory_utilization" not in engine_args:
            defaults["kv_cache_memory_bytes"] = _CACHE_ON_A_CPU
    own = {**OWN, "skip_tokenizer_init": not reads_text, "enable_sleep_mode": sleeps}
    return {**defaults, **engine_args, "model": str(folder), "dtype": dtype, **own}


OWN: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "enable_sleep_mode": False,
    # The folder's own habits (repetition penalty, top-k) would sample from a policy that the trainer does not know.
    "generation_config": "vllm",
    "weight_transfer_config": {"backend": "millrace"},
}
"""What a user's `engine_args` must not name."""

ENVIRONMENT: dict[str, str] = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # A stage's thread count comes from its config; binding threads to cores is for machines of one's own.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
"""Variables for vLLM's processes, where the user set none of their own."""
