"""Peak memory of log-probabilities over a large vocabulary, forward and backward, for `benchmarks.trainer`.

Each way runs in its own process, so that memory used by one does not hide what the other needs. The figure is the peak
of the process, or of the GPU, minus what it held before the pass, with hidden states and weight already there.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from millrace.training.logprobs import chunked_logprobs

WAYS = ("chunked", "naive")
SHAPES = {"cpu": (2048, 512, "float32"), "cuda": (16_384, 2048, "bfloat16")}
"""Tokens, width and dtype of the hidden states, by device."""
VOCAB = 131_072


def peak_bytes(way: str, device: str, tokens: int, width: int, dtype: str, vocab: int) -> int:
    """Measures in a new process."""
    return peak_of("benchmarks.trainer.memory", way, device, str(tokens), str(width), dtype, str(vocab))


def peak_of(module: str, *arguments: str) -> int:
    """`peak_bytes` of the JSON that a module prints, run in a new process."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    peak: int = json.loads(done.stdout)["peak_bytes"]
    return peak


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("device", choices=tuple(SHAPES))
    parser.add_argument("tokens", type=int)
    parser.add_argument("width", type=int)
    parser.add_argument("dtype")
    parser.add_argument("vocab", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    hidden_NH = torch.randn(arguments.tokens, arguments.width, **options).requires_grad_()
    weight_VH = torch.randn(arguments.vocab, arguments.width, **options).mul_(0.02).requires_grad_()
    targets_N = torch.randint(arguments.vocab, (arguments.tokens,), device=arguments.device)
    initial_bytes = held_bytes(arguments.device, peak=False)
    _pass(arguments.way, hidden_NH, weight_VH, targets_N)
    print(json.dumps({"peak_bytes": held_bytes(arguments.device, peak=True) - initial_bytes}))


def _pass(way: str, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> None:
    if way == "chunked":
        ones_N = torch.ones(len(targets_N), device=targets_N.device)
        logprobs_N, _, _ = chunked_logprobs(hidden_NH, weight_VH, None, targets_N, ones_N)
    else:
        logprobs_NV = torch.log_softmax((hidden_NH @ weight_VH.t()).float(), dim=-1)
        logprobs_N = logprobs_NV.gather(1, targets_N[:, None]).squeeze(1)
        del logprobs_NV
    logprobs_N.sum().backward()  # type: ignore[no-untyped-call]


def held_bytes(device: str, *, peak: bool) -> int:
    """Memory of this process, or on the GPU: now, or the most so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    # Not getrusage's maximum, which a process inherits from its parent.
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


if __name__ == "__main__":
    _main()
