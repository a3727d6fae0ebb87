"""What a machine can do: rates and sizes of GPUs and links by name, and what software makes of them.

Every figure of the cost models that is not hardware, model or config is a field of `Assumptions`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.errors import InputError

GIB = 2**30


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

    def flops_in(self, dtype: str) -> float:
        """Dense FLOP/s in a number format. A GPU without fp8 holds such weights in 8 bits and computes in bfloat16."""
        return self.flops.get(dtype, self.flops["bfloat16"])


def _gpu(
    name: str,
    tflops: tuple[float, ...],
    memory_gib: int,
    memory_rate: float,
    nvlink: float,
    network: float,
    host: float,
) -> Hardware:
    """`tflops` are those of float32, bfloat16, and fp8 if there is any; rates are GB/s."""
    return Hardware(
        name=name,
        flops={dtype: rate * 1e12 for dtype, rate in zip(("float32", "bfloat16", "fp8"), tflops, strict=False)},
        memory_bytes=memory_gib * GIB,
        memory_rate=memory_rate * 1e9,
        nvlink=nvlink * 1e9,
        network=network * 1e9,
        host_copy=host * 1e9,
    )


# NVIDIA's data sheets, figures without sparsity: A100 80 GB SXM, H100 SXM, H200 SXM, HGX B200. NVLink and PCIe are
# half of their bidirectional figures. Memory is what nvidia-smi shows, in whole GiB. Networks are those of DGX systems:
# a ConnectX-6 of 200 Gbit/s per A100, a ConnectX-7 of 400 Gbit/s for the others. NVIDIA publishes no data sheet of the
# H20; figures as vendors of such servers give them.
_TABLE = (
    _gpu("a100", (19.5, 312), 80, 2039, 300, 25, 32),
    _gpu("h100", (67, 989, 1979), 80, 3350, 450, 50, 64),
    _gpu("h200", (67, 989, 1979), 140, 4800, 450, 50, 64),
    _gpu("b200", (75, 2250, 4500), 179, 7700, 900, 50, 64),
    _gpu("h20", (44, 148, 296), 95, 4000, 450, 50, 64),
)
HARDWARE = {hardware.name: hardware for hardware in _TABLE}
"""By name."""


def hardware_named(name: str) -> Hardware:
    """Raises InputError, with the names that are known, for another."""
    if name not in HARDWARE:
        raise InputError(f'there are no figures of the hardware "{name}"; expected one of {", ".join(HARDWARE)}')
    return HARDWARE[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What no data sheet says. Defaults are for vLLM and FSDP2 in bfloat16."""

    memory_share: float = 0.8
    """Share of the HBM's rate that kernels reach. NVIDIA's aiconfigurator assumes the same of all its systems."""
    link_share: float = 0.8
    """Share of the rate of NVLink and of the network that collectives reach; nccl-tests on H100: 0.75 to 0.85."""

    matmul_share: float = 0.65
    """Share of the dense FLOP/s that a generator reaches in large prefills."""
    layer_seconds: float = 40e-6
    """What each layer of a decode step takes besides its bytes: kernels that start and end, norms, rotary embeddings.
    Fitted, with the two latencies below, to five of NVIDIA's figures (docs/costs.md)."""
    nvlink_latency: float = 20e-6
    """Seconds of an all-reduce within a host besides its bytes, with the wait for the slowest GPU."""
    network_latency: float = 175e-6
    """The same over several hosts."""

    mfu: float = 0.36
    """Share of the dense FLOP/s that the trainer's kernels reach while they wait for no other GPU. Trainers of dense
    models on H100 come to 0.25 to 0.36 of all their time; what a layout loses to collectives is computed apart."""
    mixture_mfu_factor: float = 0.5
    """Of that, what remains in a mixture of experts, whose products are small."""

    reserved_bytes: float = 4 * GIB
    """Memory of a GPU for the CUDA context, NCCL, kernels' workspaces and fragmentation; aiconfigurator
    reserves 3.5 GiB and 0.4 for NCCL."""
    generator_memory_share: float = 0.92
    """Share of its GPU that vLLM 0.32 uses unless `gpu_memory_utilization` says otherwise."""

    socket_rate: float = 1e9
    """Bytes per second that a process sends or receives by gloo over TCP, as `direct` does. Measured here on loopback
    (docs/benchmarks.md, Weights)."""
    hash_rate: float = 20e9
    """Bytes per second that a process hashes in memory. Measured here with two threads: 25 GB/s."""
    poll_seconds: float = 2e-3
    """How long a finished push waits until a generator looks for it."""
    store_write: float = 0.4e9
    """Bytes per second that a process writes to the run's store. Measured here for weights in a local folder."""
    store_read: float = 0.7e9
    """The same for reading and verifying."""
    host_copy_share: float = 0.5
    """Share of the rate between GPU and CPU that copies from and to shared memory reach, which is not pinned."""

    score_seconds: float = 5e-3
    """What a rule such as `math` takes for a response."""
    step_overhead: float = 0.1
    """What a trainer does between two steps: reading, accounts, metrics."""

    gpu_mtbf: float = 1.8e8
    """Mean time between failures that end a job, per GPU, seconds: 50,000 hours. Llama 3 (arXiv 2407.21783, §3.3.4) had
    419 unexpected interruptions in 54 days on 16,384 H100, one in 50,700 hours of a GPU."""
    restart_seconds: float = 300.0
    """From a failure until a trainer has loaded its checkpoint on whole GPUs: a guess."""


DEFAULTS = Assumptions()
"""What is assumed unless a caller says otherwise."""


def all_gather_seconds(nbytes: float, hardware: Hardware, size: int, per_host: int, assumptions: Assumptions) -> float:
    """Time of an all-gather or reduce-scatter of `nbytes` in all among `size` GPUs, `per_host` of them in each host.

    (n − 1) / n of the bytes go through every GPU (Thakur et al. 2005). Over several hosts, each host's members use
    their network cards side by side, up to the rate of NVLink. No latency: the trainer's messages are large.
    """
    if size == 1:
        return 0.0
    rate = hardware.nvlink if size <= per_host else min(hardware.nvlink, per_host * hardware.network)
    return nbytes * (size - 1) / size / (rate * assumptions.link_share)


def all_reduce_seconds(nbytes: float, hardware: Hardware, size: int, per_host: int, assumptions: Assumptions) -> float:
    """Time of an all-reduce of `nbytes` that each of `size` GPUs has, with its latency."""
    if size == 1:
        return 0.0
    latency = assumptions.nvlink_latency if size <= per_host else assumptions.network_latency
    return latency + 2 * all_gather_seconds(nbytes, hardware, size, per_host, assumptions)
