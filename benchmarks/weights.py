"""How soon a generator works with what the trainer handed over, beside the least that two copies take.

    trainer ─► shared memory ─► sync_weights ─► shm · broadcast · store ─► generator: verified, in its own parameters
    floor      two copies of the same bytes to memory that is there already, in the trainer's process

Three processes, as in a run, with one thread for torch in each. A time is the median of several pushes, and a share of
the floor the median of the shares within a round, for the floor is measured anew before each push.

    python -m benchmarks.weights [--parameters 100 500] [--ways shm broadcast store memory delta] [--engine vllm]
    python -m benchmarks.weights --device cuda [--parameters 1000 8000]
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.weights_push import Case

TARGETS = {"of_floor": 0.7, "stall_over_memcpy": 1.2, "saved": 50.0}
"""Through shared memory a version is live at this share of the floor's speed, and the trainer stands still for so many
copies at most; a delta has at most 1 / this of the bytes of the whole."""

_DTYPES = ("float32", "bfloat16")
_RESERVE = 2 << 30
_RATE_BYTES = 1 << 30


def main() -> None:
    """Measures, prints the tables and writes the figures as JSON."""
    arguments = _parse()
    if missing := _missing(arguments):
        print(missing, file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-", dir=arguments.disk) as disk:
        result = measure(arguments, Path(disk))
    _print(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(arguments: argparse.Namespace, disk: Path) -> dict[str, Any]:
    """Every figure, in seconds and bytes where the name says nothing else; stores are made in the folder `disk`."""
    # Late: `main` has looked whether they can be imported.
    from benchmarks.weights_push import measure_pushes
    from storage.memory import memory_folder

    result: dict[str, Any] = {
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "pushes": [],
        "left_out": [],
    }
    for case in _cases(arguments):
        if (free := _free_bytes()) < case.memory_bytes + _RESERVE:
            result["left_out"].append(
                f"{case.num_parameters / 1e6:g} M parameters, {case.dtype}, {case.way}: takes about "
                f"{case.memory_bytes / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
            )
        else:
            result["pushes"].append(
                measure_pushes(case, memory=memory_folder(), disk=disk, num_pushes=arguments.pushes)
            )
    if arguments.device == "cuda":
        from benchmarks.weights_cuda import copy_rates

        result["machine"]["gpu"] = torch.cuda.get_device_name()
        result["copy_rates"] = copy_rates(_RATE_BYTES)
    if arguments.engine == "vllm":
        from benchmarks.weights_vllm import measure_vllm

        result["vllm"] = measure_vllm(arguments.pushes)
    result["targets"] = targets_met(result["pushes"])
    return result


def targets_met(pushes: list[dict[str, Any]]) -> dict[str, bool]:
    """Which of `TARGETS` the figures reach, on a host: through shared memory, and of deltas."""
    met = {}
    for one in pushes:
        if one["device"] != "cpu":
            continue
        name = f"{one['parameters'] / 1e6:.0f} M {one['dtype']}"
        if one["way"] == "shm":
            met[f"live, share of the floor, {name}"] = one["of_floor"] >= TARGETS["of_floor"]
            met[f"trainer stands still, {name}"] = one["stall_over_memcpy"] <= TARGETS["stall_over_memcpy"]
        if one["way"] == "delta":
            met[f"delta, {name}"] = one["saved"] >= TARGETS["saved"]
    return met


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = ("shm", "broadcast", "store", "memory", "delta")
    parser.add_argument("--parameters", type=float, nargs="+", metavar="M", help="how many, in millions; about")
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES)
    parser.add_argument("--ways", nargs="*", choices=ways, help="by which a version travels; none: only --engine")
    parser.add_argument("--pushes", type=int, default=7, help="that are counted, of each kind")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where parameters are")
    parser.add_argument("--engine", choices=("vllm",), help="measure the pause of a real engine too")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="where the folder of a store is made")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if arguments.parameters is None:
        arguments.parameters = [1000.0, 8000.0] if on_gpu else [100.0, 500.0]
    if arguments.dtypes is None:
        arguments.dtypes = ["bfloat16"] if on_gpu else list(_DTYPES)
    if arguments.ways is None:
        arguments.ways = ["shm"] if on_gpu else list(ways)
    if arguments.pushes < 1 or min(arguments.parameters) <= 0:
        parser.error("expected at least one push, and more than 0 parameters")
    if on_gpu and set(arguments.ways) - {"shm"}:
        parser.error("with --device cuda the way is shm")
    return arguments


def _missing(arguments: argparse.Namespace) -> str | None:
    """What this machine lacks for what was asked, a sentence; None: nothing."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda needs a CUDA device, and torch sees none here"
    modules = ["xxhash"]
    if {"store", "memory", "delta"} & set(arguments.ways):
        modules += ["google_crc32c", "pyarrow", "safetensors"]
    if arguments.engine == "vllm":
        modules += ["transformers", "vllm"]
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"this benchmark needs what is not installed here: {', '.join(absent)}" if absent else None


def _cases(arguments: argparse.Namespace) -> "list[Case]":
    from benchmarks.weights_push import Case

    return [
        Case(num_parameters=int(1e6 * millions), dtype=dtype, way=way, device=arguments.device)
        for millions in arguments.parameters
        for dtype in arguments.dtypes
        for way in arguments.ways
        # In float32 every element changes at every step.
        if way != "delta" or dtype == "bfloat16"
    ]


def _free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _print(result: dict[str, Any]) -> None:
    console = Console(width=150)
    if result["pushes"]:
        _print_pushes(console, result["pushes"])
    for sentence in result["left_out"]:
        console.print(f"left out: {sentence}")
    for name, rate in result.get("copy_rates", {}).items():
        console.print(f"one copy, {name}: {rate / 1e9:.1f} GB/s")
    if "vllm" in result:
        found = result["vllm"]
        console.print(
            f"vLLM, {found['parameters'] / 1e6:.0f} M {found['dtype']}: generation pauses for "
            f"{1000 * found['pause_seconds']:.0f} ms, {found['pause_over_memcpy']:.1f} times one memcpy of "
            f"{1000 * found['memcpy_seconds']:.0f} ms"
        )
    for name, met in result["targets"].items():
        console.print(f"target {'met   ' if met else 'MISSED'}  {name}")


def _print_pushes(console: Console, pushes: list[dict[str, Any]]) -> None:
    parts = ("floor", "live", "copy", "hash", "travel", "verify", "load")
    table = Table(title="From the hand-over until live, ms; stall: the trainer stands still, in memcpys")
    for heading in ("", "MB", *parts, "of floor", "(no travel)", "stall", "wire MB"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for one in pushes:
        share = one["of_floor_without_travel"]
        without_travel = "" if share is None else f"{share:.0%}"
        saved = "" if one["saved"] is None else f" (1/{one['saved']:.0f})"
        table.add_row(
            f"{one['parameters'] / 1e6:.0f} M {one['dtype']}, {one['way']}",
            f"{one['bytes'] / 1e6:,.0f}",
            *(f"{1000 * one['seconds'][part]:,.1f}" for part in parts),
            f"{one['of_floor']:.0%}",
            without_travel,
            f"{one['stall_over_memcpy']:.2f}",
            f"{one['wire_bytes'] / 1e6:,.1f}{saved}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
