"""What a machine can do: rates and sizes of a GPU and of its links, by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.errors import InputError

_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One GPU in a host of its kind. Rates are peaks; `Assumptions` says which share of them software reaches."""

    name: str
    flops: Mapping[str, float]
    """Dense FLOP/s by number format: `float32` (without TF32), `bfloat16`, and `fp8` where the GPU computes in it."""
    memory_bytes: float
    memory_rate: float
    """Bytes per second of its HBM."""
    nvlink: float
    """Bytes per second to the GPUs of its host, in one direction."""
    network: float
    """Bytes per second to other hosts, in one direction: its share of the host's network cards."""
    host_copy: float
    """Bytes per second between GPU and CPU, in one direction."""
    gpus_per_host: int = 8
    dollars_per_hour: float | None = None
    """Price of one GPU; None: not known."""

    def flops_in(self, dtype: str) -> float:
        """Dense FLOP/s in a number format. A GPU without fp8 holds such weights in 8 bits and computes in bfloat16."""
        return self.flops.get(dtype, self.flops["bfloat16"])


# NVIDIA's data sheets, figures without sparsity: A100 80 GB SXM, H100 SXM, H200 SXM, HGX B200. NVLink and PCIe are
# half of their bidirectional figures. Memory is what nvidia-smi shows, in whole GiB. Networks are those of DGX systems:
# a ConnectX-6 of 200 Gbit/s per A100, a ConnectX-7 of 400 Gbit/s for the others.
_TABLE = (
    Hardware(
        name="a100",
        flops={"float32": 19.5e12, "bfloat16": 312e12},
        memory_bytes=80 * _GIB,
        memory_rate=2.039e12,
        nvlink=300e9,
        network=25e9,
        host_copy=32e9,
    ),
    Hardware(
        name="h100",
        flops={"float32": 67e12, "bfloat16": 989e12, "fp8": 1979e12},
        memory_bytes=80 * _GIB,
        memory_rate=3.35e12,
        nvlink=450e9,
        network=50e9,
        host_copy=64e9,
    ),
    Hardware(
        name="h200",
        flops={"float32": 67e12, "bfloat16": 989e12, "fp8": 1979e12},
        memory_bytes=140 * _GIB,
        memory_rate=4.8e12,
        nvlink=450e9,
        network=50e9,
        host_copy=64e9,
    ),
    # 600 TFLOPS of float32, 18 PFLOPS of bfloat16 and 36 of fp8 (dense) in 8 GPUs.
    Hardware(
        name="b200",
        flops={"float32": 75e12, "bfloat16": 2250e12, "fp8": 4500e12},
        memory_bytes=179 * _GIB,
        memory_rate=7.7e12,
        nvlink=900e9,
        network=50e9,
        host_copy=64e9,
    ),
    # NVIDIA publishes no data sheet of it; figures as vendors of such servers give them.
    Hardware(
        name="h20",
        flops={"float32": 44e12, "bfloat16": 148e12, "fp8": 296e12},
        memory_bytes=95 * _GIB,
        memory_rate=4.0e12,
        nvlink=450e9,
        network=50e9,
        host_copy=64e9,
    ),
)
HARDWARE = {one.name: one for one in _TABLE}
"""By name."""


def hardware_named(name: str) -> Hardware:
    """Raises InputError, with the names that are known, for another."""
    if name not in HARDWARE:
        raise InputError(f'there are no figures of the hardware "{name}"; expected one of {", ".join(HARDWARE)}')
    return HARDWARE[name]
