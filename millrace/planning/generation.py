"""How long a generator computes: by NVIDIA's kernel tables (extra `plan`), or by a roofline where these have no answer.

    tables      sizes of the model ─► a config.json as the library aiconfigurator-core reads it ─► its engine for A100,
                H100, H200, B200 and vLLM ─► milliseconds at the corners of a grid ─► linear between them

    roofline    a decode step, one token of each of b requests with c tokens in the cache:
                max( weights read / HBM rate,  2 b · parameters / FLOP/s )
                  + max( c · key-value bytes / HBM rate,  FLOPs of attention / FLOP/s )
                  + per layer: what kernels take besides, and two all-reduces of b · hidden numbers

The library knows the times of matrix products, attention, experts and all-reduces by shape, and adds up those of a
model. Nothing is downloaded. Tensor parallelism divides weights, cache and products; a key-value head is on several
GPUs if there are fewer heads.
"""

import json
import logging
import tempfile
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from millrace.planning.hardware import DEFAULTS, Assumptions, Hardware, all_reduce_seconds
from millrace.planning.models import BYTES, ModelShape

_PACKAGE = "aiconfigurator-core"
_SYSTEMS = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}
_POWERS = tuple(2**power for power in range(21))
"""Corners of the grid: requests at once, and tokens of each in the cache."""
_CHUNK = 8192
"""vLLM computes at most so many tokens of prompts at once."""
_SEQUENCE = 1024
"""How long prompts are taken to be; it matters little for the time per token."""


class Engine(Protocol):
    """What is used of the library's `EngineHandle`; results are milliseconds."""

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        """A token of each of `bs` requests with `isl` tokens in the cache."""

    def predict_prefill_latency(self, bs: int, isl: int) -> float:
        """`bs` prompts of `isl` tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """One engine with `tensor` GPUs."""

    shape: ModelShape
    hardware: Hardware
    tensor: int = 1
    dtype: str = "bfloat16"
    """Number format of weights and products: float32, bfloat16 or fp8."""
    kv_dtype: str = "bfloat16"
    assumptions: Assumptions = DEFAULTS
    source: str = "roofline"
    """Where the figures are from."""

    def decode(self, running: int, tokens: int) -> float:
        """Seconds per token of each of `running` requests, with `tokens` of all of them in the key-value cache."""
        shape = self.shape
        weights = shape.touched_parameters(running) * BYTES[self.dtype] / self.tensor
        products = 2 * running * shape.active_parameters / self.tensor
        cache_bytes = tokens * shape.kv_bytes(self.kv_dtype) / min(self.tensor, shape.kv_heads)
        attention = 4 * tokens * shape.layers * shape.heads * shape.head_dim / self.tensor
        return self._slower(weights, products) + self._slower(cache_bytes, attention) + self._per_layer(running)

    def prefill(self, tokens: int) -> float:
        """Seconds to compute so many tokens of prompts, or of caches after new weights, at once."""
        if not tokens:
            return 0.0
        weights = self.shape.touched_parameters(tokens) * BYTES[self.dtype] / self.tensor
        # Only the last token of each prompt needs the output layer.
        flops = 2 * tokens * (self.shape.active_parameters - self.shape.output_parameters) / self.tensor
        return self._slower(weights, flops) + self._per_layer(tokens)

    def _per_layer(self, tokens: int) -> float:
        # Activations are in 16 bits where weights are in 8.
        message = tokens * self.shape.hidden * max(2, BYTES[self.dtype])
        reduced = all_reduce_seconds(message, self.hardware, self.tensor, self.hardware.gpus_per_host, self.assumptions)
        return self.shape.layers * (self.assumptions.layer_seconds + 2 * reduced)

    def _slower(self, nbytes: float, flops: float) -> float:
        rate = self.hardware.memory_rate * self.assumptions.memory_share
        return max(nbytes / rate, flops / (self.hardware.flops_in(self.dtype) * self.assumptions.matmul_share))


class KernelTable:
    """A generator by the library's figures. `source` names the library and its version."""

    def __init__(self, engine: Engine, source: str) -> None:
        self.source = source

        @cache
        def decode(running: int, context: int) -> float:
            return engine.predict_decode_latency(running, context) / 1000

        @cache
        def prefill(tokens: int) -> float:
            sequences = max(1, tokens // _SEQUENCE)
            return engine.predict_prefill_latency(sequences, tokens // sequences) / 1000

        self._decode, self._prefill = decode, prefill

    def decode(self, running: int, tokens: int) -> float:
        """Seconds per token of each of `running` requests, with `tokens` of all of them in the key-value cache."""
        low, high, share = _between(max(1, running))
        shorter, longer, part = _between(max(1.0, tokens / max(1, running)))
        of_low = (1 - part) * self._decode(low, shorter) + part * self._decode(low, longer)
        of_high = (1 - part) * self._decode(high, shorter) + part * self._decode(high, longer)
        return (1 - share) * of_low + share * of_high

    def prefill(self, tokens: int) -> float:
        """Seconds to compute so many tokens at once: in chunks, as vLLM does."""
        chunks, rest = divmod(tokens, _CHUNK)
        seconds = chunks * self._prefill(_CHUNK) if chunks else 0.0
        if rest:
            low, high, share = _between(rest)
            seconds += (1 - share) * self._prefill(low) + share * self._prefill(high)
        return seconds


def with_tables(roofline: Roofline) -> Roofline | KernelTable:
    """Returns the generator that `roofline` describes by the library's tables, or `roofline` itself if it has none.

    It has none if the package is not installed, and for hardware, models and layouts that NVIDIA did not measure.
    """
    try:
        table = KernelTable(_engine(roofline), f"aiconfigurator {version(_PACKAGE)}")
        # Its tables are read by the first question, which may find none.
        table.decode(100, 100_000)
        table.prefill(_CHUNK)
    except (PackageNotFoundError, ImportError, KeyError, ValueError, RuntimeError):
        # The library's own errors are ValueErrors and RuntimeErrors.
        return roofline
    return table


def _engine(roofline: Roofline) -> Engine:
    """Raises KeyError for hardware without tables, and the library's errors."""
    system = _SYSTEMS[roofline.hardware.name]
    if roofline.dtype == "float32":
        raise KeyError(roofline.dtype)
    from aiconfigurator_core.sdk import EngineHandle

    # It reports every table that it fills from another engine's.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    # The library knows no cache in float32.
    kv_dtype = "bfloat16" if roofline.kv_dtype == "float32" else roofline.kv_dtype
    formats: dict[str, Any] = {"gemm_quant_mode": roofline.dtype, "kvcache_quant_mode": kv_dtype}
    if roofline.shape.experts:
        formats |= {"moe_quant_mode": roofline.dtype, "moe_tp_size": roofline.tensor}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_library_config(roofline.shape)))
        engine: Engine = EngineHandle.compile(folder, system, "vllm", tp_size=roofline.tensor, **formats)
    return engine


def _library_config(shape: ModelShape) -> dict[str, Any]:
    """Returns a config.json with these sizes."""
    sizes = {
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
    if not shape.experts:
        return sizes | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return sizes | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
    }


def _between(value: float) -> tuple[int, int, float]:
    """Returns the corners around a value of at least 1, and how far it is from the lower to the upper one, 0 to 1.

    Beyond the last corner the line through the last two continues.
    """
    index = min(bisect_right(_POWERS, value), len(_POWERS) - 1)
    low, high = _POWERS[index - 1], _POWERS[index]
    return low, high, (value - low) / (high - low)
