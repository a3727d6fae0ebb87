"""Runs the GPU tests, campaigns and benchmarks on a machine with GPUs, and writes one report to send.

    doctor ─► torch, one GPU ─► torch, several GPUs ─► vLLM, one GPU ─► vLLM, several GPUs ─► gpu-check.txt

Each part is a separate process with a time limit, and a part that fails stops no other. Exit code 0 if all that
could run passed, 1 if something failed, 2 without a GPU.

    python -m benchmarks.gpu_check [--out gpu-check.txt] [--only NAME]
"""

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from millrace.doctor.diagnosis import as_json, diagnose
from millrace.doctor.machine import Machine

_OUT = "{out}"
"""In a command: the part's temporary folder."""
_FIGURES = "figures.json"
"""Name in that folder of a benchmark's figures."""
_TAIL_LINES = 60

Outcome = Literal["passed", "failed", "too slow", "left out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One command, in its own process."""

    name: str
    shows: str
    """The conclusion if it passes, in one sentence."""
    command: tuple[str, ...]
    """Arguments of this Python interpreter."""
    gpus: int = 1
    """Least number of GPUs."""
    package: str | None = None
    """Package that it needs besides what Millrace requires."""
    minutes: float = 10.0
    """Time limit."""
    passed_before: str = ""
    """GPU, torch and date of the last report in which it passed; '' if there is no such report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of a part."""

    part: Check
    outcome: Outcome
    reason: str = ""
    """Why it failed or was left out, or the last line of its tests."""
    seconds: float = 0.0
    figures: str = ""
    """A benchmark's figures, as JSON."""
    output: str = ""
    """The last lines of its output."""

    def __str__(self) -> str:
        seconds = "" if self.outcome == "left out" else f" in {self.seconds:.0f} s"
        return f"{self.part.name}: {self.outcome}{seconds}{f' ({self.reason})' if self.reason else ''}"


def _tests(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments)


def _campaign(preset: str, run_id: str, *settings: str) -> tuple[str, ...]:
    shared = ("training.device=cuda", "training.max_steps=40", *settings)
    config = f"configs/presets/{preset}.yaml"
    return ("-m", "flows.cli.main", "run", config, "--root", _OUT, "--run-id", run_id, "--set", *shared)


def _benchmark(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", "--device", "cuda", "--json", f"{_OUT}/{_FIGURES}", *arguments)


_VLLM_ON_CUDA = (
    "generation.engine_args.gpu_memory_utilization=0.3",
    "generation.engine_args.kv_cache_memory_bytes=null",
    "generation.engine_args.enforce_eager=false",
    "model.dtype=bfloat16",
)

_H100 = "H100, torch 2.11, 2026-11-27"

PARTS: Sequence[Check] = (
    Check(
        name="trainer on a GPU",
        shows="A GPU takes the steps that a CPU takes, attends in one kernel, and frees its memory asleep.",
        command=_tests("tests/gpu/test_trainer_cuda.py"),
        passed_before=_H100,
    ),
    Check(
        name="weights from a GPU",
        shows="A version leaves a GPU through shared memory and reaches another process's GPU bit for bit.",
        command=_tests("tests/gpu/test_weights_cuda.py"),
        passed_before=_H100,
    ),
    Check(
        name="shards from a GPU",
        shows="Ranks on a GPU offer their shards by direct, and buckets on the GPU are those of a CPU.",
        command=_tests("tests/gpu/test_shards_cuda.py"),
        passed_before=_H100,
    ),
    Check(
        name="CUDA IPC",
        shows="Two processes share a tensor on a GPU by its memory handle.",
        command=_tests("tests/gpu/test_ipc_cuda.py"),
        passed_before=_H100,
    ),
    Check(
        name="campaign that trains on a GPU",
        shows="A whole campaign runs with its trainer on a GPU.",
        command=_campaign("tiny-cpu", "trains-on-a-gpu"),
        passed_before=_H100,
    ),
    Check(
        name="benchmark of the trainer",
        shows="Tokens per second, MFU and memory of a model of 1.24 billion parameters in bfloat16.",
        command=_benchmark("trainer"),
        minutes=20.0,
        passed_before=_H100,
    ),
    Check(
        name="benchmark of weight sync",
        shows="Seconds from a trainer's GPU to a generator's, and the GPU's own copy rates.",
        command=_benchmark("weights", "--parameters", "1000"),
        minutes=20.0,
        passed_before=_H100,
    ),
    Check(
        name="weights by direct over NCCL",
        shows="Shards go over NCCL from a trainer's GPUs to a generator's; with two GPUs one rank, with four three.",
        command=_tests("tests/gpu/test_direct_nccl.py", "-k", "bit_for_bit"),
        gpus=2,
    ),
    Check(
        name="killed member of a push",
        shows="A generator that is killed in a push over NCCL is an error for the trainer within the deadline.",
        command=_tests("tests/gpu/test_direct_nccl.py", "-k", "killed"),
        gpus=2,
    ),
    Check(
        name="trainer ranks over NCCL",
        shows="FSDP2 and tensor parallelism over NCCL train as one process does.",
        command=_tests("tests/gpu/test_ranks_cuda.py"),
        gpus=2,
    ),
    Check(
        name="campaign of two ranks over NCCL",
        shows="A whole campaign runs with a trainer on two GPUs.",
        command=_campaign("tiny-cpu", "two-ranks", "training.parallel.data=2"),
        gpus=2,
    ),
    Check(
        name="vLLM on CUDA",
        shows="vLLM's CUDA build keeps the contract of engines: seeds, log μ, updates in the middle of a response.",
        command=_tests("-m", "vllm", "tests/millrace/generation"),
        package="vllm",
        minutes=30.0,
    ),
    Check(
        name="updates under CUDA graphs",
        shows="New weights reach the responses in flight of an engine that captured its graphs before.",
        command=_tests("tests/gpu/test_vllm_cuda.py", "-k", "graphs"),
        package="vllm",
    ),
    Check(
        name="updates of experts",
        shows="New weights reach the experts of Qwen3-MoE and Mixtral, which vLLM packs for its kernels.",
        command=_tests("tests/gpu/test_vllm_cuda.py", "-k", "reach_experts"),
        package="vllm",
        minutes=20.0,
    ),
    Check(
        name="updates of gpt-oss",
        shows="An update of gpt-oss is refused: vLLM would keep its experts and sinks.",
        command=_tests("tests/gpu/test_vllm_cuda.py", "-k", "gpt_oss"),
        package="vllm",
    ),
    Check(
        name="updates in fp8",
        shows="An engine in fp8 computes after an update as one that starts with the new weights.",
        command=_tests("tests/gpu/test_vllm_cuda.py", "-k", "fp8"),
        package="vllm",
        minutes=20.0,
    ),
    Check(
        name="turns on one GPU",
        shows="Trainer and vLLM take turns on one GPU: one sleeps while the other works.",
        command=_campaign("tiny-vllm-cpu", "turns", *_VLLM_ON_CUDA, "pipeline.mode=sync", "placement.colocated=true"),
        package="vllm",
        minutes=20.0,
    ),
    Check(
        name="updates with tensor parallelism",
        shows="New weights reach both GPUs of an engine.",
        command=_tests("tests/gpu/test_vllm_cuda.py", "-k", "both_gpus"),
        package="vllm",
        gpus=2,
    ),
    Check(
        name="campaign on two GPUs with vLLM",
        shows="A whole campaign runs with trainer and vLLM, under CUDA graphs, each on its own GPU.",
        command=_campaign("tiny-vllm-cpu", "vllm-on-a-gpu", *_VLLM_ON_CUDA),
        package="vllm",
        gpus=2,
        minutes=20.0,
    ),
    Check(
        name="two replicas on two GPUs",
        shows="A whole campaign runs with two vLLM engines, each on its own GPU, and its trainer on the CPU.",
        command=_campaign(
            "tiny-vllm-cpu", "two-replicas", *_VLLM_ON_CUDA, "generation.replicas=2", "training.device=cpu"
        ),
        package="vllm",
        gpus=2,
        minutes=20.0,
    ),
)
"""In the order in which they run."""


def main() -> int:
    """Runs the parts, prints their outcomes and writes the report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.txt"), help="the report (default: gpu-check.txt)")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="only these parts")
    arguments = parser.parse_args()
    machine = Machine("runs")
    num_gpus = 0 if machine.torch_devices is None else machine.torch_devices.num_gpus
    if not num_gpus:
        print("gpu-check: torch sees no GPU, so there is nothing to check; millrace doctor says why.", file=sys.stderr)
        return 2
    results = []
    for part in PARTS:
        if arguments.only is None or part.name in arguments.only:
            print(f"{part.name} …", flush=True)
            results.append(check(part, num_gpus))
            print(results[-1], flush=True)
    print("", *_table(results), "", sep="\n")
    arguments.out.write_text("\n".join(_report(machine, num_gpus, results)))
    print(f"Written to {arguments.out}. Please send it: no part of it is secret but the names in its paths.")
    return 1 if any(result.outcome in ("failed", "too slow") for result in results) else 0


def check(part: Check, num_gpus: int) -> Result:
    """Runs one part, unless the machine has too few GPUs or not its package."""
    if num_gpus < part.gpus:
        return Result(part=part, outcome="left out", reason=f"needs {part.gpus} GPUs, and there are {num_gpus}")
    if part.package is not None and importlib.util.find_spec(part.package) is None:
        return Result(part=part, outcome="left out", reason=f"needs the package {part.package}, which is not installed")
    with tempfile.TemporaryDirectory(prefix="millrace-gpu-check-") as folder:
        log, figures = Path(folder, "output.txt"), Path(folder, _FIGURES)
        started = time.monotonic()
        code = _run([sys.executable, *(word.replace(_OUT, folder) for word in part.command)], log, part.minutes * 60)
        seconds = time.monotonic() - started
        lines = log.read_text(errors="replace").splitlines()
        json_text = figures.read_text() if figures.exists() else ""
    outcome: Outcome = "passed"
    reason = ""
    if code is None:
        outcome, reason = "too slow", f"stopped after {part.minutes:g} minutes"
    elif code:
        outcome, reason = "failed", f"exit code {code}"
    elif "pytest" in part.command:
        reason = lines[-1] if lines else ""
        outcome = "passed" if re.search(r"\d passed", reason) else "left out"
    output = "\n".join(lines[-_TAIL_LINES:])
    return Result(part=part, outcome=outcome, reason=reason, seconds=seconds, figures=json_text, output=output)


def _run(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Returns the exit code, or None after the time limit. Kills whatever the command leaves behind."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _table(results: Sequence[Result]) -> Iterator[str]:
    """Yields a heading and a line per part: its outcome, when it passed before, and its conclusion or its failure."""
    rows = [("part", "outcome", "seconds", "passed before", "conclusion or reason")]
    for result in results:
        part, passed = result.part, result.outcome == "passed"
        seconds = "" if result.outcome == "left out" else f"{result.seconds:.0f}"
        text = part.shows if passed else result.reason
        rows.append((part.name, result.outcome, seconds, part.passed_before or "never", text))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _report(machine: Machine, num_gpus: int, results: Sequence[Result]) -> Iterator[str]:
    """Yields the report's lines: the machine, each part's outcome, then figures and the output of failures."""
    commit = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, check=False).stdout.strip()
    yield "Millrace on GPUs: the report of `make gpu-check`"
    yield f"{datetime.now(UTC).isoformat(timespec='seconds')}, commit {commit or 'unknown'}"
    yield f"{num_gpus} × {machine.gpus[0]}" if machine.gpus else f"{num_gpus} GPUs"
    for line in as_json(diagnose(machine))["lines"]:
        yield f"{line['what']}: {line['value']}"
    yield ""
    yield from _table(results)
    for result in results:
        if result.figures:
            yield f"\n==== {result.part.name}: figures ====\n{result.figures}"
        if result.outcome in ("failed", "too slow"):
            command = " ".join(("python", *result.part.command))
            yield f"\n==== {result.part.name}: the end of its output ====\n{command}\n\n{result.output}"


if __name__ == "__main__":
    sys.exit(main())
