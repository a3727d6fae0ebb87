"""How long a generator computes, by a roofline: the slower of bytes and products, then collectives and kernels.

    a decode step, one token of each of b requests with c tokens in the cache:
    max( weights read / HBM rate,  2 b · parameters / FLOP/s )
      + max( c · key-value bytes / HBM rate,  FLOPs of attention / FLOP/s )
      + per layer: what kernels take besides, and two all-reduces of b · hidden numbers

Tensor parallelism divides weights, cache and products; a key-value head is on several GPUs if there are fewer heads.

Against NVIDIA's measured kernel tables (`kernel_tables.py`; H100, vLLM, 128 tokens in, 1,019 out), from which
`layer_seconds` and the latencies of `Assumptions` were fitted, milliseconds per token:

    model, format   GPUs   batch   tables   here
    8B, bf16           1     128     10.9   10.9
    8B, bf16           8     256      5.2    5.0
    70B, bf16          8     128     14.4   15.8
    405B, bf16        16      64     71.7   72.1
    405B, fp8          8      64     32.5   32.5

In 72 cases of these and other models on H100, H200 and B200 (batches of 16 to 512, 638 and 4,096 tokens of each in the
cache) it is 0.80 to 1.36 times the tables, in 40 of them within a tenth; in 20 on A100, 0.65 to 1.03 times. Of prefills
over several hosts it says a third of what the tables do, because they let no two GPUs of a host share their links.
"""

from dataclasses import dataclass
from typing import Protocol

from millrace.planning.costs.assumptions import DEFAULTS, Assumptions
from millrace.planning.costs.hardware import Hardware
from millrace.planning.costs.links import all_reduce_seconds
from millrace.planning.costs.model_shape import BYTES, ModelShape


class GenerationModel(Protocol):
    """Seconds of one generator's work."""

    @property
    def source(self) -> str:
        """Where its figures are from: `roofline`, or a table by name and version."""

    def decode(self, running: int, tokens: int) -> float:
        """Seconds per token of each of `running` requests, with `tokens` of all of them in the key-value cache."""

    def prefill(self, tokens: int) -> float:
        """Seconds to compute so many tokens of prompts, or of caches after new weights, at once."""


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

    @property
    def source(self) -> str:
        """The protocol's."""
        return "roofline"

    def decode(self, running: int, tokens: int) -> float:
        """Seconds per token of each of `running` requests, with `tokens` of all of them in the key-value cache."""
        shape = self.shape
        weights = shape.touched_parameters(running) * BYTES[self.dtype] / self.tensor
        products = 2 * running * shape.active_parameters / self.tensor
        cache = tokens * shape.kv_bytes(self.kv_dtype) / min(self.tensor, shape.kv_heads)
        attention = 4 * tokens * shape.layers * shape.heads * shape.head_dim / self.tensor
        bound = self._slower(weights, products) + self._slower(cache, attention)
        return bound + self._per_layer(running) + self.assumptions.engine_seconds

    def prefill(self, tokens: int) -> float:
        """Seconds to compute so many tokens at once. What they see of each other is left out: it is small beside the
        weights' products unless prompts have tens of thousands of tokens."""
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
