"""Speed of the trainer's step compared with plain transformers on the same batch, and memory of log-probabilities.

    one batch of mixed lengths ─┬─► packed    Trainer.step                     tokens/s, model FLOPs utilisation
                                ├─► padded    forward, backward                ratio of the same round
                                └─► sorted    … with rows sorted by length
    groups of one prompt ─► Trainer.step with the prompt computed once, and once per response ─► ratio, peak memory
    hidden states × a vocabulary of 128 k ─► log π of targets, forward and backward ─► peak memory, compared with naive

The model is a small Llama in float32 on one CPU thread, or on a GPU one of 1.24 billion parameters in bfloat16.

    python -m benchmarks.trainer [--device cuda] [--rounds 5] [--json FILE]
"""

import statistics
import sys
from typing import Any

import torch

from benchmarks.harness import finish, make_parser, median_ratio, print_line, time_rounds
from benchmarks.trainer import sharing
from benchmarks.trainer.memory import SHAPES, VOCAB, WAYS, peak_bytes
from benchmarks.trainer.steps import CASES, TrainerCase, contenders, make_samples, model_flops

TARGETS = {"speedup": 1.5, "peak_share": 0.35}
"""Minimum multiple of the padded contender's tokens per second; maximum share of the naive peak."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 floating-point operations per second by part of the GPU's name, from the maker's data sheet."""


def main() -> None:
    """Measures, prints the figures and writes them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one to warm up")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("expected at least one round")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda needs a CUDA device, but torch sees none", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    tokens, width, dtype = SHAPES[arguments.device]
    result: dict[str, Any] = {"gpu": _gpu_name(arguments.device) or None}
    # In separate processes, before this one fills the GPU.
    result["memory"] = measure_memory(arguments.device, tokens=tokens, width=width, dtype=dtype, vocab=VOCAB)
    result["step"] = measure_steps(CASES[arguments.device], torch.device(arguments.device), arguments.rounds)
    if arguments.device == "cpu":
        result["sharing"] = sharing.measure_sharing(arguments.rounds)
    result["targets"] = targets_met(result)
    _print(result)
    finish(arguments.json, result)


def measure_steps(case: TrainerCase, device: torch.device, rounds: int) -> dict[str, Any]:
    """Seconds, tokens per second and ratios of the contenders: medians over `rounds`."""
    samples = make_samples(case)
    calls = contenders(case, samples, device)
    seconds = time_rounds(calls, rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    positions = sum(sample.num_tokens for sample in samples)
    flops = model_flops(case, samples)
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in _gpu_name(device.type)), None)
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


def measure_memory(device: str, *, tokens: int, width: int, dtype: str, vocab: int) -> dict[str, Any]:
    """Peak bytes of each way, without the inputs."""
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
    """Whether the figures meet `TARGETS`."""
    return {
        "tokens per second over padded": result["step"]["speedup"] >= TARGETS["speedup"],
        "peak memory of log-probabilities": result["memory"]["share"] <= TARGETS["peak_share"],
        **sharing.targets_met(result.get("sharing", [])),
    }


def _gpu_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else ""


def _print(result: dict[str, Any]) -> None:
    step, memory = result["step"], result["memory"]
    print_line(
        f"{step['tokens']:,} tokens, {step['response_tokens']:,} of them responses', longest {step['longest']:,}"
    )
    for name, rate in step["tokens_per_second"].items():
        print_line(f"{name:7}{rate:12,.0f} tokens/s")
    print_line(
        f"packed: {step['speedup']:.2f} times padded, {step['speedup_over_sorted']:.2f} times sorted; "
        f"{step['model_flops_per_second'] / 1e12:,.3g} TFLOP/s of the model"
    )
    if step["model_flops_utilisation"] is not None:
        print_line(f"model FLOPs utilisation {step['model_flops_utilisation']:.1%}")
    print_line(
        f"peak of log-probabilities, {memory['tokens']:,} tokens × {memory['vocab']:,}: "
        f"{memory['peak_bytes']['chunked'] / 1e6:,.0f} MB, naive {memory['peak_bytes']['naive'] / 1e6:,.0f} MB: "
        f"{memory['share']:.2f}"
    )
    sharing.print_sharing(result.get("sharing", []))


if __name__ == "__main__":
    main()
