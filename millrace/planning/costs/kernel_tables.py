"""What NVIDIA measured of a generator's kernels: an adapter to its library `aiconfigurator-core` (extra `plan`).

    sizes of the model ─► a config.json as the library reads it ─► its engine for A100, H100, H200, B200 and vLLM
                                                                        │ milliseconds at the corners of a grid
                              decode, prefill ◄── between them, linear ─┘

The library knows the times of matrix products, attention, experts and all-reduces by shape, and adds up those of a
model. Nothing is downloaded. A corner takes 0.2 ms and is computed once.
"""

import json
import logging
import tempfile
from bisect import bisect_right
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from millrace.planning.costs.generation import GenerationModel, Roofline
from millrace.planning.costs.model_shape import ModelShape

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


class KernelTable:
    """A generator by the library's figures."""

    def __init__(self, engine: Engine, source: str, engine_seconds: float = 0.0) -> None:
        self._engine = engine
        self._source = source
        self._engine_seconds = engine_seconds
        self._decoded: dict[tuple[int, int], float] = {}
        self._prefilled: dict[int, float] = {}

    @property
    def source(self) -> str:
        """The library and its version."""
        return self._source

    def decode(self, running: int, tokens: int) -> float:
        """Seconds per token of each of `running` requests, with `tokens` of all of them in the key-value cache."""
        low, high, share = _between(max(1, running))
        shorter, longer, part = _between(max(1.0, tokens / max(1, running)))
        corners = (
            (1 - share) * ((1 - part) * self._decode(low, shorter) + part * self._decode(low, longer)),
            share * ((1 - part) * self._decode(high, shorter) + part * self._decode(high, longer)),
        )
        return sum(corners) + self._engine_seconds

    def prefill(self, tokens: int) -> float:
        """Seconds to compute so many tokens at once: in chunks, as vLLM does."""
        chunks, rest = divmod(tokens, _CHUNK)
        seconds = chunks * self._prefill(_CHUNK) if chunks else 0.0
        if rest:
            low, high, share = _between(rest)
            seconds += (1 - share) * self._prefill(low) + share * self._prefill(high)
        return seconds

    def _decode(self, running: int, context: int) -> float:
        if (running, context) not in self._decoded:
            self._decoded[running, context] = self._engine.predict_decode_latency(running, context) / 1000
        return self._decoded[running, context]

    def _prefill(self, tokens: int) -> float:
        if tokens not in self._prefilled:
            sequences = max(1, tokens // _SEQUENCE)
            self._prefilled[tokens] = self._engine.predict_prefill_latency(sequences, tokens // sequences) / 1000
        return self._prefilled[tokens]


def with_tables(roofline: Roofline) -> GenerationModel:
    """The generator that `roofline` describes by the library's tables, or `roofline` itself where it has none.

    It has none if the package is not installed, and for hardware, models and layouts that NVIDIA did not measure.
    """
    try:
        source = f"aiconfigurator {version(_PACKAGE)}"
        engine = _engine(roofline)
        table = KernelTable(engine, source, roofline.assumptions.engine_seconds)
        # Its tables are read by the first question, which may find none.
        table.decode(100, 100_000)
        table.prefill(_CHUNK)
    except (PackageNotFoundError, ImportError, KeyError, ValueError, RuntimeError):
        # The library's own errors are ValueErrors and RuntimeErrors.
        return roofline
    return table


def _engine(roofline: Roofline) -> Engine:
    """Raises KeyError for hardware without tables, and the library's errors, which are listed above."""
    system = _SYSTEMS[roofline.hardware.name]
    if roofline.dtype == "float32":
        raise KeyError(roofline.dtype)
    from aiconfigurator_core.sdk import EngineHandle

    # It tells of every table that it fills from another engine's.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    formats: dict[str, Any] = {"gemm_quant_mode": roofline.dtype, "kvcache_quant_mode": _format(roofline.kv_dtype)}
    if roofline.shape.experts:
        formats |= {"moe_quant_mode": roofline.dtype, "moe_tp_size": roofline.tensor}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_library_config(roofline.shape)))
        engine: Engine = EngineHandle.compile(folder, system, "vllm", tp_size=roofline.tensor, **formats)
    return engine


def _format(dtype: str) -> str:
    """A cache in float32 counts as one in bfloat16: the library knows none."""
    return "bfloat16" if dtype == "float32" else dtype


def _library_config(shape: ModelShape) -> dict[str, Any]:
    """A config.json with these sizes. Biases and norms of heads take no time worth counting."""
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
    """The corners around a value of at least 1, and how far it is from the lower to the upper one, 0 to 1.

    Beyond the last corner the line through the last two goes on.
    """
    index = min(bisect_right(_POWERS, value), len(_POWERS) - 1)
    low, high = _POWERS[index - 1], _POWERS[index]
    return low, high, (value - low) / (high - low)
