"""How vLLM starts and how it ends: its arguments, its environment variables, its processes. vLLM is not imported."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

# By default vLLM would take nearly all memory of the machine for it.
_CACHE_ON_A_CPU = 2**30
_PATIENCE = 10.0
"""Seconds that a worker has to notice that its core is gone."""

ENVIRONMENT: dict[str, str] = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # A stage's thread count comes from its config; binding threads to cores suits dedicated machines only.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine's process has threads, whose locks a fork would copy; on a CPU vLLM spawns anyway.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
}
"""Variables for vLLM's processes, where the user set none."""


def vllm_arguments(
    folder: Path,
    *,
    dtype: str,
    engine_args: Mapping[str, Any],
    reads_text: bool = False,
    sleeps: bool = False,
    truncates: bool = False,
    adapters: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs` for the model in `folder`.

    `engine_args` are the user's; a config refuses those that are set here (`configs.generation.RESERVED`).
    `reads_text`: whether some responses end at texts, too; `sleeps`: whether it gives its device back at times;
    `truncates`: whether some tokens are drawn from a part of the vocabulary (top-p, top-k), which vLLM must then name;
    `adapters`: arguments for versions that are LoRA adapters (`configs.generation.adapter_arguments`).
    """
    # Without masks, what vLLM kept is read from the log-probabilities of the whole vocabulary.
    defaults: dict[str, Any] = {"disable_log_stats": True, "max_logprobs": -1}
    # Counting devices does not start CUDA; a build of torch for CPUs counts none.
    on_a_cpu = not torch.cuda.device_count()
    if on_a_cpu:
        # vLLM 0.32's engine core on a CPU dies of a seeded request whose prompt is computed in pieces: it resets the
        # request's generator after each piece (`set_offset` in v1/worker/gpu_model_runner.py), which a CPU can't.
        defaults["enable_chunked_prefill"] = False
        if "gpu_memory_utilization" not in engine_args:
            defaults["kv_cache_memory_bytes"] = _CACHE_ON_A_CPU
    reserved = {
        "model": str(folder),
        "dtype": dtype,
        "logprobs_mode": "processed_logprobs",
        # How vLLM names the tokens that it kept, on a GPU.
        "return_sampling_mask": truncates and not on_a_cpu,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": not reads_text,
        "enable_sleep_mode": sleeps,
        # The folder's own settings (repetition penalty, top-k) would sample from a policy the trainer does not know.
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": "millrace"},
    }
    if truncates and on_a_cpu:
        reserved["max_logprobs"] = -1
    return {**defaults, **engine_args, **reserved, **(adapters or {})}


def vllm_processes() -> set[psutil.Process]:
    """vLLM's processes below this one."""
    return {process for process in psutil.Process().children(recursive=True) if is_alive(process)}


def end(processes: Iterable[psutil.Process]) -> None:
    """Waits until these have ended, and kills the ones that do not.

    A worker whose core was killed usually ends too, but not always: in the middle of a call it can wait for the
    core's next message for ever, and hold the device's memory.
    """
    _, left = psutil.wait_procs([process for process in processes if is_alive(process)], timeout=_PATIENCE)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether it is a process of vLLM that runs. An orphan stays a zombie until its new parent waits for it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.name().startswith("VLLM::")
    except psutil.NoSuchProcess:
        return False
