"""How fast the trainer's step is beside plain transformers on the same batch, and what log-probabilities cost.

    one batch of mixed lengths ─┬─► packed    Trainer.step                     tokens/s, model FLOPs utilisation
                                ├─► padded    forward, backward                ratio of the same round
                                └─► sorted    … with rows sorted by length
    hidden states × a vocabulary of 128 k ─► log π of targets, forward and backward ─► peak memory, beside naive

On a CPU a small Llama in float32, one thread; on a GPU one of 1.24 billion parameters in bfloat16.

    python -m benchmarks.trainer [--device cuda] [--rounds 5] [--json FILE]
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.timing import in_turn, median_ratio
from benchmarks.trainer_memory import SHAPES, VOCAB, WAYS, peak_bytes
from benchmarks.trainer_steps import CASES, Case, contenders, make_samples, model_flops

TARGETS = {"speedup": 1.5, "peak_share": 0.35}
"""Times the padded contender's tokens a second, at least; share of the naive peak, at most."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 floating-point operations a second, by what is in the name of the GPU: its maker's data sheet."""


def main() -> None:
    """Measures, prints the figures and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="that are counted; one more warms up")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("expected at least one round")
    if given.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda needs a CUDA device, and torch sees none here", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    tokens, width, dtype = SHAPES[given.device]
    result: dict[str, Any] = {"machine": _machine(given.device)}
    result["step"] = measure_steps(CASES[given.device], torch.device(given.device), given.rounds)
    result["memory"] = measure_memory(given.device, tokens=tokens, width=width, dtype=dtype, vocab=VOCAB)
    result["targets"] = targets_met(result)
    _print(result)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


def measure_steps(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """Seconds, tokens a second and ratios of the contenders: medians over `rounds`."""
    samples = make_samples(case)
    calls = contenders(case, samples, device)
    timed = [in_turn({name: partial(_ready, call) for name, call in calls.items()}, turn) for turn in range(rounds + 1)]
    seconds = {name: [one[name] for one in timed[1:]] for name in calls}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    positions = sum(sample.num_tokens for sample in samples)
    flops = model_flops(case, samples)
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in _gpu(device.type)), None)
    return {
        "case": vars(case),
        "tokens": positions,
        "response_tokens": sum(len(sample.response_tokens) for sample in samples),
        "longest": max(sample.num_tokens for sample in samples),
        "rounds": rounds,
        "seconds": seconds,
        "tokens_per_second": {name: positions / median for name, median in medians.items()},
        "speedup": median_ratio(seconds["padded"], seconds["packed"]),
        "speedup_over_sorted": median_ratio(seconds["sorted"], seconds["packed"]),
        "model_flops": flops,
        "model_flops_per_second": flops / medians["packed"],
        "model_flops_utilisation": None if peak is None else flops / medians["packed"] / peak,
    }


def _ready(call: Callable[[], object]) -> Callable[[], object]:
    """Nothing has to be prepared."""
    return call


def measure_memory(device: str, *, tokens: int, width: int, dtype: str, vocab: int) -> dict[str, Any]:
    """Peak bytes of each way, above the inputs."""
    peaks = {way: peak_bytes(way, device, tokens, width, dtype, vocab) for way in WAYS}
    return {
        "tokens": tokens,
        "width": width,
        "dtype": dtype,
        "vocab": vocab,
        "peak_bytes": peaks,
        "share": peaks["chunked"] / peaks["naive"],
    }


def targets_met(result: dict[str, Any]) -> dict[str, bool]:
    """Which of `TARGETS` the figures reach."""
    return {
        "tokens a second over padded": result["step"]["speedup"] >= TARGETS["speedup"],
        "peak memory of log-probabilities": result["memory"]["share"] <= TARGETS["peak_share"],
    }


def _machine(device: str) -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "gpu": _gpu(device) or None,
    }


def _gpu(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else ""


def _print(result: dict[str, Any]) -> None:
    console = Console(width=120)
    step, memory = result["step"], result["memory"]
    console.print(
        f"{step['tokens']:,} tokens, {step['response_tokens']:,} of them responses', longest {step['longest']:,}"
    )
    for name, rate in step["tokens_per_second"].items():
        console.print(f"{name:7}{rate:12,.0f} tokens/s")
    console.print(
        f"packed: {step['speedup']:.2f} times padded, {step['speedup_over_sorted']:.2f} times sorted; "
        f"{step['model_flops_per_second'] / 1e12:,.3g} TFLOP/s of the model"
    )
    if step["model_flops_utilisation"] is not None:
        console.print(f"model FLOPs utilisation {step['model_flops_utilisation']:.1%}")
    console.print(
        f"peak of log-probabilities, {memory['tokens']:,} tokens × {memory['vocab']:,}: "
        f"{memory['peak_bytes']['chunked'] / 1e6:,.0f} MB, naive {memory['peak_bytes']['naive'] / 1e6:,.0f} MB: "
        f"{memory['share']:.2f}"
    )
    for name, met in result["targets"].items():
        console.print(f"target {'met   ' if met else 'MISSED'}  {name}")


if __name__ == "__main__":
    main()
