"""How responses are sampled: the engine, its arguments and its number format."""

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from configs.section import Count, Positive, Replicas, Section

_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""On x86 the first two, on ARM the last. Without them a CPU emulates bfloat16, many times slower than float32."""


@cache
def multiplies_bfloat16(
    cpu: Path = Path("/proc/cpuinfo"), gpu: Path = Path("/proc/driver/nvidia/version")
) -> str | None:
    """Names what multiplies bfloat16 on this machine: `GPU` or a flag of the CPU. None if nothing does."""
    if gpu.exists():
        return "GPU"
    words = set(cpu.read_text().split()) if cpu.exists() else set()
    return next((flag for flag in _CPU_FLAGS if flag in words), None)


def _resolve(name: str) -> str:
    if name != "auto":
        return name
    return "bfloat16" if multiplies_bfloat16() else "float32"


Precision = Annotated[Literal["auto", "float32", "bfloat16"], AfterValidator(_resolve)]
"""A validated value is never `auto`."""

RESERVED = frozenset(
    {
        "model", "tokenizer", "skip_tokenizer_init", "dtype", "seed", "generation_config", "override_generation_config",
        "logprobs_mode", "return_sampling_mask", "logits_processors", "watermark_config", "enable_prefix_caching",
        "enable_sleep_mode", "weight_transfer_config", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank",
        "lora_target_modules",
    }
)  # fmt: skip
"""Arguments of vLLM that Millrace sets (`millrace/generation/engines/vllm/startup.py`), because the trainer knows no
other distribution than that of `generation.temperature`, `top_p`, `top_k` and `max_new_tokens`."""


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's LoRA kernels are made for; an adapter of a rank between two of them uses the higher one."""


def adapter_arguments(rank: int, target_modules: list[str], max_staleness: int) -> dict[str, Any]:
    """Arguments of vLLM for versions that are LoRA adapters.

    There are slots for each version of a trajectory that is not too old, and for the version that arrives.
    """
    num_slots = max_staleness + 2
    return {
        "enable_lora": True,
        "max_lora_rank": next(served for served in VLLM_RANKS if served >= rank),
        "max_loras": num_slots,
        "max_cpu_loras": num_slots,
        "lora_target_modules": target_modules,
    }


def _is_free(name: str) -> str:
    if name in RESERVED:
        raise ValueError("another argument, because Millrace sets this one")
    if not name.isidentifier():
        raise ValueError("the name of an argument as vLLM's Python interface spells it, such as tensor_parallel_size")
    return name


def _is_exact(arguments: dict[str, Any]) -> dict[str, Any]:
    speculative = arguments.get("speculative_config")
    if isinstance(speculative, dict) and speculative.get("rejection_sample_method") == "synthetic":
        raise ValueError(
            "a rejection_sample_method other than synthetic in speculative_config, which samples from another "
            "distribution than the policy's"
        )
    return arguments


EngineArgs = Annotated[dict[Annotated[str, AfterValidator(_is_free)], Any], AfterValidator(_is_exact)]
"""Arguments that may be set, by name; they leave the sampled distribution as it is."""


class SamplingConfig(Section):
    """How many responses a prompt has, and how their tokens are drawn; a source may have its own."""

    group_size: Count = 8
    """Responses per prompt; advantages compare them with each other. 1 with `prompts.demonstrations`."""
    temperature: Positive = 1.0
    """The logits are divided by this before sampling, no unit."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the likeliest tokens with this probability mass are sampled from; 1 keeps the whole vocabulary.
    The trainer renormalises its policy over the tokens that were kept, which are stored with each response: 4 bytes for
    each of them."""
    top_k: Count | None = None
    """At most this many of the likeliest tokens are sampled from, before `top_p` is applied to them; null: no limit. It
    limits how many kept tokens are stored."""
    max_new_tokens: Count = 16
    """Maximum length of a response, tokens, end-of-sequence token included."""


class GenerationConfig(SamplingConfig):
    """How responses are sampled."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Library that samples the tokens; run `make vllm` or `make gpu` once before using `vllm`. A run whose sources all
    have `prompts.demonstrations` starts none."""
    engine_args: EngineArgs = Field(default_factory=dict)
    """vLLM engine arguments by vLLM's names, such as `tensor_parallel_size`, `quantization`, `max_model_len`; only with
    the engine `vllm`."""
    dtype: Precision | None = None
    """Number format of the weights in generators; null: bfloat16 for `vllm` with `training.device: cuda`, otherwise
    `model.dtype`; `auto`: bfloat16 where the machine that starts the run multiplies it, else float32."""
    replicas: Replicas = 1
    """Number of generator processes."""
    groups_per_batch: Count = 16
    """Places of a generator, in groups: it keeps groups_per_batch * group_size responses in flight. In `sync` mode all
    groups of a step are sampled together."""
    keep_cache: bool = True
    """Whether responses in flight keep their key-value cache when new weights arrive; later tokens then also read keys
    and values of older versions. `false`: the cache is recomputed from the prompt and the tokens so far. Later tokens
    carry the new version either way, and requests that enter later never read caches of older versions."""
    threads: Count | None = None
    """CPU threads per generator. null: chosen at the start of each attempt, as `training.threads` is."""

    @property
    def num_threads(self) -> int:
        """`threads`; 1 while none are chosen."""
        return self.threads or 1
