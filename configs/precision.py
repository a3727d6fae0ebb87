"""Number formats. `auto` is bfloat16 where this machine multiplies it, and float32 elsewhere."""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

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
