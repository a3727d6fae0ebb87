"""How long collectives between GPUs take: bytes over the narrowest link, and a latency.

    GPUs of one host ─► NVLink
    GPUs of several hosts ─► each host's members of the group use their network cards side by side, as NCCL's rings do,
                             up to the rate of NVLink

n GPUs, s bytes: an all-gather or a reduce-scatter of s in all moves (n − 1) / n · s through every GPU, an all-reduce of
s twice that (Thakur et al. 2005; nccl-tests calls the rate "bus bandwidth").
"""

from millrace.planning.costs.assumptions import Assumptions
from millrace.planning.costs.hardware import Hardware


def group_rate(hardware: Hardware, size: int, per_host: int, assumptions: Assumptions) -> float:
    """Bytes per second through each of `size` GPUs that do a collective, `per_host` of them in each host."""
    if size <= per_host:
        return hardware.nvlink * assumptions.link_share
    return min(hardware.nvlink, per_host * hardware.network) * assumptions.link_share


def all_gather_seconds(nbytes: float, hardware: Hardware, size: int, per_host: int, assumptions: Assumptions) -> float:
    """Of `nbytes` in all, a part of which each of `size` GPUs has; a reduce-scatter takes as long. No latency: the
    trainer's are large."""
    if size == 1:
        return 0.0
    return nbytes * (size - 1) / size / group_rate(hardware, size, per_host, assumptions)


def all_reduce_seconds(nbytes: float, hardware: Hardware, size: int, per_host: int, assumptions: Assumptions) -> float:
    """Of `nbytes` that each of `size` GPUs has, with its latency."""
    if size == 1:
        return 0.0
    latency = assumptions.nvlink_latency if size <= per_host else assumptions.network_latency
    return latency + 2 * all_gather_seconds(nbytes, hardware, size, per_host, assumptions)
