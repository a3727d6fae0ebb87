"""The names allowed in `generation.engine_args`: any of vLLM's except those that Millrace sets."""

from typing import Annotated, Any

from pydantic import AfterValidator

_TOKEN_IDS = "no such key: vLLM gets token ids and gives them back, and the stages have the tokenizer"
_SAMPLING = "generation.temperature, top_p, top_k and max_new_tokens, which alone shape the sampling"

RESERVED = {
    "model": "model.path, which names the model",
    "tokenizer": _TOKEN_IDS,
    "skip_tokenizer_init": _TOKEN_IDS,
    "dtype": "generation.dtype, the number format of the weights in generators",
    "seed": "seed, from which each request draws its own",
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "logprobs_mode": "no such key: log-probabilities are those of the distribution that was sampled from",
    "return_sampling_mask": "generation.top_p and generation.top_k, which ask for it where they leave tokens out",
    "logits_processors": f"{_SAMPLING}: the trainer does not know what else changes the distribution",
    "watermark_config": f"{_SAMPLING}: the trainer does not know what else changes the distribution",
    "enable_prefix_caching": "no such key: prefix caching is always on, and each new policy version clears the cache",
    "enable_sleep_mode": "placement.colocated, which says whether generators sleep",
    "weight_transfer_config": "weights.transport, which says how new weights travel",
}
"""Arguments of vLLM that Millrace sets (`millrace/generation/engines/vllm/arguments.py`), with what to use instead."""


def _is_free(name: str) -> str:
    if name in RESERVED:
        raise ValueError(RESERVED[name])
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
