"""How long a generator computes, by the kernels that NVIDIA measured (extra `plan`, package aiconfigurator-core).

The package knows the times of matrix products, attention, experts and all-reduces by shape for vLLM on A100, H100, H200
and B200, and adds up those of a model, whose sizes it reads from a config.json. Nothing is downloaded.
"""

import json
import logging
import tempfile
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from millrace.errors import InputError, MissingExtra
from millrace.planning.hardware import Hardware
from millrace.planning.models import ModelShape

_PACKAGE, _MODULE = "aiconfigurator-core", "aiconfigurator_core"
_CHUNK = 8192
"""Most tokens of prompts that vLLM computes at once."""
_SEQUENCE = 1024
"""Tokens of a prompt in a prefill; it matters little for the time per token."""
_BITS = 6
"""Binary digits to which requests and tokens are rounded, so that a simulation asks for each figure once."""


class KernelTable:
    """One engine with `tensor` GPUs. Raises MissingExtra without the package, InputError for a layout without figures.

    `dtype` is the number format of weights and products: float32, bfloat16 or fp8. vLLM was not measured in float32,
    which counts as twice bfloat16.
    """

    def __init__(self, shape: ModelShape, hardware: Hardware, *, tensor: int, dtype: str, kv_dtype: str) -> None:
        if find_spec(_MODULE) is None:
            raise MissingExtra("planning for GPUs", _PACKAGE, "plan")
        self.source = f"aiconfigurator {version(_PACKAGE)}"
        seconds = 2e-3 if dtype == "float32" else 1e-3
        if dtype == "float32":
            self.source += ", twice its bfloat16"

        @cache
        def decode(running: int, context: int) -> float:
            return seconds * float(engine.predict_decode_latency(running, context))

        @cache
        def prefill(tokens: int) -> float:
            sequences = max(1, tokens // _SEQUENCE)
            return seconds * float(engine.predict_prefill_latency(sequences, tokens // sequences))

        try:
            engine = _open_engine(
                shape, hardware, tensor, *(f.replace("float32", "bfloat16") for f in (dtype, kv_dtype))
            )
            # The first questions read the tables, where this model's kernels may be missing.
            decode(64, 1024)
            prefill(_CHUNK)
        except (ValueError, RuntimeError) as error:
            layout = f"{shape.name} in {dtype} on {hardware.name}, {tensor} GPUs per generator"
            raise InputError(
                f"{self.source} has no figures of {layout} ({str(error)[:80]} …)",
                expected="another layout, or --from with a stored run",
            ) from error
        self._decode, self._prefill = decode, prefill

    def decode(self, running: int, tokens: int) -> float:
        """Seconds per token of each of `running` requests, with `tokens` of all of them in the key-value cache."""
        return self._decode(_rounded(max(1, running)), _rounded(max(1, tokens // max(1, running))))

    def prefill(self, tokens: int) -> float:
        """Seconds to compute these tokens at once: in chunks, as vLLM does."""
        chunks, rest = divmod(tokens, _CHUNK)
        return chunks * self._prefill(_CHUNK) + (self._prefill(_rounded(rest)) if rest else 0.0)


def _rounded(number: int) -> int:
    shift = max(0, number.bit_length() - _BITS)
    return (number + (1 << shift >> 1)) >> shift << shift


def _open_engine(shape: ModelShape, hardware: Hardware, tensor: int, dtype: str, kv_dtype: str) -> Any:
    """Raises the package's errors, which are ValueErrors and RuntimeErrors."""
    from aiconfigurator_core.sdk import EngineHandle

    # It reports every table that it fills from another engine's.
    logging.getLogger(_MODULE).setLevel(logging.ERROR)
    formats: dict[str, Any] = {"gemm_quant_mode": dtype, "kvcache_quant_mode": kv_dtype}
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 2**20,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "torch_dtype": "bfloat16",
    }
    if shape.experts:
        formats |= {"moe_quant_mode": dtype, "moe_tp_size": tensor}
        sizes |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": shape.intermediate,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
        }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes))
        return EngineHandle.compile(folder, f"{hardware.name}_sxm", "vllm", tp_size=tensor, **formats)
