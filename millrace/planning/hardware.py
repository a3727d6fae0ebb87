"""GPUs and links by name, the share of their rates that software reaches, and the time of collectives.

Constants here hold for vLLM and FSDP2 in bfloat16. docs/planning.md#cost-models says where each is from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import InputError
from millrace.models.weight_files import read_object

GIB = 2**30
GPUS_PER_HOST = 8

MEMORY_SHARE = 0.8
"""Share of the HBM's rate that kernels reach."""
LINK_SHARE = 0.8
"""Share of the rate of NVLink and of the network that collectives reach."""
HOST_COPY_SHARE = 0.5
"""Share of the rate between GPU and CPU that copies from and to shared memory reach, which is not pinned."""
_NVLINK_LATENCY, _NETWORK_LATENCY = 20e-6, 175e-6
"""Seconds of an all-reduce besides its bytes, with the wait for the slowest GPU: within a host, and over several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One GPU in a host of its kind. Rates are peaks, in one direction.

    By NVIDIA's data sheets, without sparsity: A100 80 GB SXM, H100 SXM, H200 SXM, HGX B200. NVLink and PCIe are half of
    their bidirectional figures, memory is what nvidia-smi shows, and networks are those of DGX systems.
    """

    name: str
    flops: Mapping[str, float]
    """Dense FLOP/s by number format: `float32` (without TF32) and `bfloat16`."""
    memory_bytes: float
    memory_rate: float
    """Bytes per second of its HBM."""
    nvlink: float
    """Bytes per second to the GPUs of its host."""
    network: float
    """Bytes per second to other hosts: its share of the host's network cards."""
    host_copy: float
    """Bytes per second between GPU and CPU."""
    gpus_per_host: int = GPUS_PER_HOST


def hardware_named(name: str) -> Hardware:
    """Returns the figures of a kind of GPU, by `hardware.json`. Raises InputError for another name."""
    kinds = read_object(Path(__file__).parent / "hardware.json")
    if name not in kinds:
        raise InputError(f'the figures of the hardware "{name}" are not known', expected=f"one of {', '.join(kinds)}")
    return Hardware(name=name, **kinds[name])


def all_gather_seconds(nbytes: float, hardware: Hardware, size: int, per_host: int) -> float:
    """Returns the time of an all-gather or reduce-scatter of `nbytes` in all among `size` GPUs, `per_host` per host.

    (n − 1) / n of the bytes go through every GPU (Thakur et al. 2005). Over several hosts, each host's members use
    their network cards side by side, up to the rate of NVLink. No latency: the trainer's messages are large.
    """
    if size == 1:
        return 0.0
    rate = hardware.nvlink if size <= per_host else min(hardware.nvlink, per_host * hardware.network)
    return nbytes * (size - 1) / size / (rate * LINK_SHARE)


def all_reduce_seconds(nbytes: float, hardware: Hardware, size: int, per_host: int) -> float:
    """Returns the time of an all-reduce of `nbytes` that each of `size` GPUs has, with its latency."""
    if size == 1:
        return 0.0
    latency = _NVLINK_LATENCY if size <= per_host else _NETWORK_LATENCY
    return latency + 2 * all_gather_seconds(nbytes, hardware, size, per_host)
