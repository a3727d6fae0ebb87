"""What there is to check on a machine with GPUs, part by part."""

from collections.abc import Sequence
from dataclasses import dataclass

OUT = "{out}"
"""In a command: the part's folder for what it writes."""
FIGURES = "figures.json"
"""Name in that folder of a benchmark's figures."""
COUNTS = "tests.xml"
"""Name in that folder of a pytest run's JUnit report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One command, in a process of its own."""

    name: str
    """Stays the same for ever: earlier reports are searched for it."""
    shows: str
    """What is known if it passes, in one sentence."""
    command: tuple[str, ...]
    """Arguments of this Python interpreter."""
    gpus: int = 1
    """How many it needs."""
    package: str | None = None
    """Distribution that it needs, beside what Millrace requires."""
    minutes: float = 10.0
    """Limit of its time."""


def _tests(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={OUT}/{COUNTS}", *arguments)


def _campaign(preset: str, run_id: str, *settings: str) -> tuple[str, ...]:
    shared = ("training.device=cuda", "training.max_steps=40", *settings)
    config = f"configs/presets/{preset}.yaml"
    return ("-m", "flows.cli.main", "run", config, "--root", OUT, "--run-id", run_id, "--set", *shared)


def _benchmark(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", "--device", "cuda", "--json", f"{OUT}/{FIGURES}", *arguments)


_VLLM_ON_CUDA = (
    "generation.engine_args.gpu_memory_utilization=0.3",
    "generation.engine_args.kv_cache_memory_bytes=null",
    "model.dtype=bfloat16",
)

PARTS: Sequence[Part] = (
    Part(
        name="trainer on a GPU",
        shows="A GPU takes the steps that a CPU takes, attends in one kernel, and frees its memory asleep.",
        command=_tests("tests/gpu/test_trainer_cuda.py"),
    ),
    Part(
        name="weights from a GPU",
        shows="A version leaves a GPU through shared memory and reaches another process's GPU bit for bit.",
        command=_tests("tests/gpu/test_weights_cuda.py"),
    ),
    Part(
        name="shards from a GPU",
        shows="Ranks on a GPU offer their shards by direct, and buckets on the GPU are those of a CPU.",
        command=_tests("tests/gpu/test_shards_cuda.py"),
    ),
    Part(
        name="weights by direct over NCCL",
        shows="Shards go over NCCL from a trainer's GPUs to a generator's; with two GPUs one rank, with four three.",
        command=_tests("tests/gpu/test_direct_nccl.py"),
        gpus=2,
    ),
    Part(
        name="trainer ranks over NCCL",
        shows="FSDP2 and tensor parallelism over NCCL train as one process does.",
        command=_tests("tests/gpu/test_ranks_cuda.py"),
        gpus=2,
    ),
    Part(
        name="vLLM on CUDA",
        shows="vLLM's CUDA build keeps the contract of engines: seeds, log μ, updates in the middle of a response.",
        command=_tests("-m", "vllm", "tests/millrace/generation"),
        package="vllm",
        minutes=30.0,
    ),
    Part(
        name="campaign that trains on a GPU",
        shows="A whole campaign runs with its trainer on a GPU.",
        command=_campaign("tiny-cpu", "trains-on-a-gpu"),
    ),
    Part(
        name="campaign on a GPU with vLLM",
        shows="A whole campaign runs with trainer and vLLM on one GPU at the same time.",
        command=_campaign("tiny-vllm-cpu", "vllm-on-a-gpu", *_VLLM_ON_CUDA),
        package="vllm",
        minutes=20.0,
    ),
    Part(
        name="turns on one GPU",
        shows="Trainer and vLLM take turns on one GPU: one sleeps while the other works.",
        command=_campaign("tiny-vllm-cpu", "turns", *_VLLM_ON_CUDA, "pipeline.mode=sync", "placement.colocated=true"),
        package="vllm",
        minutes=20.0,
    ),
    Part(
        name="campaign of two ranks over NCCL",
        shows="A whole campaign runs with a trainer on two GPUs.",
        command=_campaign("tiny-cpu", "two-ranks", "training.parallel.data=2"),
        gpus=2,
    ),
    Part(
        name="benchmark of the trainer",
        shows="Tokens per second and memory of the trainer's step beside plain transformers.",
        command=_benchmark("trainer"),
        minutes=20.0,
    ),
    Part(
        name="benchmark of weight sync",
        shows="Seconds from a trainer's GPU to a generator's, beside the GPU's own copy rates.",
        command=_benchmark("weights", "--parameters", "1000"),
        minutes=20.0,
    ),
)
"""In the order in which they run: what is quick and tells most comes first."""
