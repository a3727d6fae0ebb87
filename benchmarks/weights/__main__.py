"""How soon a generator uses the trainer's new weights, compared with the time of two copies.

    trainer ─► shared memory ─► sync_weights ─► shm · store ─► generator: verified, in its own parameters
    floor      two copies of the same bytes to memory already allocated, in the trainer's process
    --ranks    a trainer of several ranks, whose shards are gathered for shm and store, and sent as they are by direct

Three processes, as in a run, with one torch thread each. A time is the median of several pushes. A share of the floor
is the median of the shares within a round, because the floor is measured before each push.

    python -m benchmarks.weights [--parameters 100 500] [--ways shm store memory delta] [--ranks 1 2 4] [--engine vllm]
    python -m benchmarks.weights --device cuda [--parameters 1000 8000]
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import finish, make_parser, print_line, print_table

if TYPE_CHECKING:
    from benchmarks.weights.push import PushCase

TARGETS = {"of_floor": 0.7, "stall_over_memcpy": 1.2, "saved": 50.0, "direct_speed": 2.0, "direct_stall": 0.6}
"""Through shared memory: minimum share of the floor's speed, and the most copies for which the trainer is blocked.
For deltas: how many times fewer bytes than the whole, at least. For `direct` from several ranks: how many times the
speed of gathering for shm, at least, and which part of its stall, at most."""

_DTYPES = ("float32", "bfloat16")
_WAYS = ("shm", "store", "memory", "delta")
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
    finish(arguments.json, result)


def measure(arguments: argparse.Namespace, disk: Path) -> dict[str, Any]:
    """All figures, in seconds and bytes unless the name has another unit; stores are created in the folder `disk`."""
    # Imported here: `main` has checked first that their packages are installed.
    from benchmarks.weights.policy import llama_shapes
    from benchmarks.weights.push import measure_pushes
    from storage.stores.memory import memory_folder

    result: dict[str, Any] = {"pushes": [], "left_out": []}
    for case in _cases(arguments):
        if (free := _free_bytes()) < case.memory_bytes + _RESERVE:
            result["left_out"].append(
                f"{case.num_parameters / 1e6:g} M parameters, {case.dtype}, {case.way}: needs about "
                f"{case.memory_bytes / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB are free"
            )
            continue
        result["pushes"].append(measure_pushes(case, memory=memory_folder(), disk=disk, num_pushes=arguments.pushes))
    if arguments.ranks:
        from benchmarks.weights.ranks import measure_ranks

        shapes = llama_shapes(int(1e6 * max(arguments.parameters)))
        result["ranks"] = measure_ranks(shapes, arguments.ranks, memory_folder(), disk, arguments.pushes)
    if arguments.device == "cuda":
        from benchmarks.weights.push import copy_rates

        result["gpu"] = torch.cuda.get_device_name()
        result["copy_rates"] = copy_rates(_RATE_BYTES)
    if arguments.engine == "vllm":
        from benchmarks.weights.vllm import measure_vllm

        result["vllm"] = measure_vllm(arguments.pushes)
    result["targets"] = targets_met(result["pushes"]) | ranks_met(result.get("ranks", []))
    return result


def targets_met(pushes: list[dict[str, Any]]) -> dict[str, bool]:
    """Returns which of `TARGETS` are met on the CPU: for shared memory and for deltas."""
    met = {}
    for push in pushes:
        if push["device"] != "cpu":
            continue
        name = f"{push['parameters'] / 1e6:.0f} M {push['dtype']}"
        if push["way"] == "shm":
            met[f"live, share of the floor, {name}"] = push["of_floor"] >= TARGETS["of_floor"]
            met[f"trainer blocked, {name}"] = push["stall_over_memcpy"] <= TARGETS["stall_over_memcpy"]
        if push["way"] == "delta":
            met[f"delta, {name}"] = push["saved"] >= TARGETS["saved"]
    return met


def ranks_met(pushes: list[dict[str, Any]]) -> dict[str, bool]:
    """Returns which of `TARGETS` several ranks meet with `direct`, against the same weights gathered for shm."""
    met = {}
    gathered = {push["ranks"]: push for push in pushes if push["way"] == "shm"}
    for push in pushes:
        if push["way"] == "direct" and push["ranks"] > 1 and push["ranks"] in gathered:
            other = gathered[push["ranks"]]
            name = f"direct, {push['ranks']} ranks"
            met[f"{name}: live"] = other["live"] / push["live"] >= TARGETS["direct_speed"]
            met[f"{name}: stall"] = push["stall"] / other["stall"] <= TARGETS["direct_stall"]
    return met


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--parameters", type=float, nargs="+", metavar="M", help="approximate sizes, in millions")
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES)
    parser.add_argument("--ways", nargs="*", choices=_WAYS, help="how weights are sent; none: only --engine")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of trainer ranks, in one run")
    parser.add_argument("--pushes", type=int, default=7, help="measured pushes per case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the parameters are")
    parser.add_argument("--engine", choices=("vllm",), help="also measure the pause of a real engine")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="where to create the folder of a store")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if arguments.parameters is None:
        arguments.parameters = [1000.0, 8000.0] if on_gpu else [100.0, 500.0]
    if arguments.dtypes is None:
        arguments.dtypes = ["bfloat16"] if on_gpu else list(_DTYPES)
    if arguments.ways is None:
        arguments.ways = ["shm"] if on_gpu else list(_WAYS)
    if arguments.pushes < 1 or min(arguments.parameters) <= 0:
        parser.error("expected at least one push, and more than 0 parameters")
    if on_gpu and set(arguments.ways) - {"shm"}:
        parser.error("--device cuda supports only --ways shm")
    return arguments


def _missing(arguments: argparse.Namespace) -> str | None:
    """Returns which packages or device the arguments need and this machine does not have, or None."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda needs a CUDA device, but torch sees none"
    modules = ["xxhash"]
    if {"store", "memory", "delta"} & set(arguments.ways):
        modules += ["google_crc32c", "pyarrow", "safetensors"]
    if arguments.engine == "vllm":
        modules += ["transformers", "vllm"]
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"this benchmark needs packages that are not installed: {', '.join(absent)}" if absent else None


def _cases(arguments: argparse.Namespace) -> "list[PushCase]":
    from benchmarks.weights.push import PushCase

    return [
        PushCase(num_parameters=int(1e6 * millions), dtype=dtype, way=way, device=arguments.device)
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
    if result["pushes"]:
        _print_pushes(result["pushes"])
    for sentence in result["left_out"]:
        print_line(f"left out: {sentence}")
    if "ranks" in result:
        _print_ranks(result["ranks"])
    for name, rate in result.get("copy_rates", {}).items():
        print_line(f"one copy, {name}: {rate / 1e9:.1f} GB/s")
    if "vllm" in result:
        vllm = result["vllm"]
        print_line(
            f"vLLM, {vllm['parameters'] / 1e6:.0f} M {vllm['dtype']}: generation pauses for "
            f"{1000 * vllm['pause_seconds']:.0f} ms, {vllm['pause_over_memcpy']:.1f} times one memcpy of "
            f"{1000 * vllm['memcpy_seconds']:.0f} ms"
        )


def _print_pushes(pushes: list[dict[str, Any]]) -> None:
    parts = ("floor", "live", "copy", "hash", "travel", "verify", "load")
    headings = ("", "MB", *parts, "of floor", "(no travel)", "stall", "wire MB")
    title = "From the handover until live, ms; stall: the trainer is blocked, in memcpys"
    rows = []
    for push in pushes:
        share = push["of_floor_without_travel"]
        saved = "" if push["saved"] is None else f" (1/{push['saved']:.0f})"
        rows.append(
            [
                f"{push['parameters'] / 1e6:.0f} M {push['dtype']}, {push['way']}",
                f"{push['bytes'] / 1e6:,.0f}",
                *(f"{1000 * push['seconds'][part]:,.1f}" for part in parts),
                f"{push['of_floor']:.0%}",
                "" if share is None else f"{share:.0%}",
                f"{push['stall_over_memcpy']:.2f}",
                f"{push['wire_bytes'] / 1e6:,.1f}{saved}",
            ]
        )
    print_table(title, headings, rows)


def _print_ranks(measured: list[dict[str, Any]]) -> None:
    headings = ("", "MB", "live", "stall", "wire MB", "trainer's peak MB a rank")
    title = "A trainer of several ranks, float32: from the handover until live, ms"
    rows = []
    for push in measured:
        rows.append(
            [
                f"{push['ranks']} ranks, {push['way']}",
                f"{push['bytes'] / 1e6:,.0f}",
                f"{1000 * push['live']:,.0f}",
                f"{1000 * push['stall']:,.0f}",
                f"{push['wire_bytes'] / 1e6:,.0f}",
                f"{push['peak_bytes'] / 1e6:,.0f}",
            ]
        )
    print_table(title, headings, rows)


if __name__ == "__main__":
    main()
