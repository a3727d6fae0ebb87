"""What no data sheet says: shares of peak rates that software reaches, latencies, and what a stage does besides.

Every figure of the cost models that is not hardware, model or config is a field here.
"""

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """Defaults are for vLLM and FSDP2 in bfloat16; change one with `dataclasses.replace`."""

    memory_share: float = 0.8
    """Share of the HBM's rate that kernels reach. NVIDIA's aiconfigurator assumes the same of all its systems."""
    link_share: float = 0.8
    """Share of the rate of NVLink and of the network that collectives reach; nccl-tests on H100: 0.75 to 0.85."""

    matmul_share: float = 0.65
    """Share of the dense FLOP/s that a generator reaches in large prefills."""
    layer_seconds: float = 40e-6
    """What each layer of a decode step takes besides its bytes: kernels that start and end, norms, rotary embeddings.
    Fitted, with the two latencies below, to the five figures in `generation.py`."""
    nvlink_latency: float = 20e-6
    """Seconds of an all-reduce within a host besides its bytes, with the wait for the slowest GPU."""
    network_latency: float = 175e-6
    """The same over several hosts."""
    engine_seconds: float = 0.0
    """What an engine does between two decode steps while its GPUs wait: scheduling, sampling, handing tokens out.
    vLLM overlaps it with the next step."""

    mfu: float = 0.36
    """Share of the dense FLOP/s that the trainer's kernels reach while they wait for no other GPU. Trainers of dense
    models on H100 come to 0.25 to 0.36 of all their time; what a layout loses to collectives is computed apart."""
    mixture_mfu_factor: float = 0.5
    """Of that, what remains in a mixture of experts, whose products are small."""

    reserved_bytes: float = 4 * _GIB
    """Memory of a GPU for the CUDA context, NCCL, kernels' workspaces and fragmentation; aiconfigurator
    reserves 3.5 GiB and 0.4 for NCCL."""
    generator_memory_share: float = 0.92
    """Share of its GPU that vLLM 0.32 uses unless `gpu_memory_utilization` says otherwise."""

    socket_rate: float = 1e9
    """Bytes per second that a process sends or receives by gloo over TCP, as `direct` does. Measured here on loopback
    (docs/benchmarks.md, Weights)."""
    message_us: float = 20.0
    """What each message of a push costs besides its bytes, microseconds."""
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
