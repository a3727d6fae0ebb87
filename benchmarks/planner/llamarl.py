"""LlamaRL's table of step times (arXiv 2505.24034): which part of the gain follows from what. A check of shape.

    sync, shared GPUs, one TP for both, bf16; weights change their layout over NVLink and network
      ─► overlap       half of the GPUs generate while the others train, at most one version behind; shards go
                       straight to generators
      ─► own TP        generators have the smallest TP into which the model fits
      ─► fp8           generators compute in fp8, and need half the TP
      and the last with weights that are gathered in one process instead: what direct transfer is worth

Each row adds one change to the row above; its gain is the step time above over its own. What the product of all gains
leaves of the published gain stays unexplained. TP sizes, batches and lengths of the paper's runs are not public: those
here are assumptions, so this is no reproduction. Gathering goes at 2 GB/s: the paper gives OpenRLHF's update as 4.3 s
for 7B and 112 s for 70B in bfloat16, 3.2 and 1.3 GB/s.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.planner.workloads import costs_with_nccl, cut_lengths, gpu_config
from benchmarks.report import machine, make_table, write_json
from millrace.planning.costs.assumptions import DEFAULTS
from millrace.planning.costs.hardware import hardware_named
from millrace.planning.costs.known_models import model_named
from millrace.planning.costs.model_shape import BYTES, ModelShape
from millrace.planning.simulation.simulate import simulate

PROMPT, MEAN, SIGMA, LIMIT = 256, 512, 0.6, 4096
"""Assumed lengths, tokens."""
GROUPS, GROUP_SIZE = 256, 8
"""Assumed batch: 2,048 responses."""
_STEPS, _WARMUP = 16, 4
_GATHERED_RATE = 2e9
"""Bytes per second at which a model is gathered in one process and handed to all generators."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A row of their table."""

    model: str
    gpus: int
    published: tuple[float, float]
    """Seconds per step: synchronous, LlamaRL."""
    tensor: int
    """TP of generators in the synchronous system, and of trainers up to 8, assumed."""
    own: int
    """Smallest TP of a generator in bfloat16."""
    fp8: int
    """The same in fp8."""


CASES = (
    Case("llama-8b", 256, (22.45, 8.90), tensor=8, own=1, fp8=1),
    Case("llama-70b", 256, (82.32, 20.67), tensor=8, own=4, fp8=2),
    Case("llama-405b", 1024, (635.8, 59.5), tensor=64, own=16, fp8=8),
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command `llamarl`."""
    parser = commands.add_parser("llamarl", help=__doc__.partition("\n")[0], description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Computes and prints the tables."""
    console = Console(width=140)
    results = []
    for case in CASES:
        rows = waterfall(case)
        _print(console, case, rows)
        results.append({"case": case.model, "published": case.published, "rows": rows})
    assumed = {
        "prompt": PROMPT,
        "mean": MEAN,
        "sigma": SIGMA,
        "limit": LIMIT,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
    }
    write_json(arguments.json, {"assumed": assumed, "models": results, "machine": machine()})


def waterfall(case: Case) -> list[Row]:
    """Seconds per step after each change, and its gain."""
    half = case.gpus // 2
    shared, divided = (case.gpus, case.gpus), (case.gpus - half, half)
    changes: Sequence[tuple[str, dict[str, Any]]] = (
        ("sync, shared GPUs", {"gpus": shared, "tensor": case.tensor, "bound": None}),
        ("overlap", {"gpus": divided, "tensor": case.tensor, "bound": 1}),
        ("own TP", {"gpus": divided, "tensor": case.own, "bound": 1}),
        ("fp8", {"gpus": divided, "tensor": case.fp8, "bound": 1, "fp8": True}),
        ("… gathered", {"gpus": divided, "tensor": case.fp8, "bound": 1, "fp8": True, "gathered": True}),
    )
    rows: list[Row] = []
    for name, how in changes:
        seconds, idle = _step_seconds(case, **how)
        gain = rows[-1]["seconds"] / seconds if rows else 1.0
        rows.append({"change": name, "seconds": seconds, "gain": gain, "idle": idle})
    return rows


def _step_seconds(
    case: Case, *, gpus: tuple[int, int], tensor: int, bound: int | None, fp8: bool = False, gathered: bool = False
) -> tuple[float, dict[str, float]]:
    """Seconds per step, and idle shares."""
    shape, hardware = model_named(case.model), hardware_named("h100")
    config = gpu_config(
        gpus=gpus,
        # Millrace's trainer divides no key-value head.
        tensor=(min(case.tensor, shape.kv_heads), tensor),
        groups=GROUPS,
        group_size=GROUP_SIZE,
        max_tokens=LIMIT,
        bound=bound,
        quantization="fp8" if fp8 else None,
    )
    lengths = cut_lengths(prompt=PROMPT, mean=MEAN, sigma=SIGMA, limit=LIMIT, group_size=GROUP_SIZE)
    costs = costs_with_nccl(config, shape, hardware, DEFAULTS)
    if gathered:
        # The trainer stands still while its model is gathered, and generators while they load it.
        costs = replace(costs, handover=_gather_seconds(shape), pause=costs.pause + _gather_seconds(shape))
    outcome = simulate(config, costs, lengths, steps=_STEPS, warmup=_WARMUP)
    return outcome.step_seconds, dict(outcome.idle)


def _gather_seconds(shape: ModelShape) -> float:
    return shape.parameters * BYTES["bfloat16"] / _GATHERED_RATE


def _print(console: Console, case: Case, rows: Sequence[Row]) -> None:
    before, after = case.published
    table = make_table(f"{case.model}, {case.gpus} H100", ("", "s per step", "gain", "train idle", "generate idle"))
    for row in rows:
        table.add_row(
            row["change"],
            f"{row['seconds']:.1f}",
            f"{row['gain']:.2f}",
            f"{row['idle']['train']:.0%}",
            f"{row['idle']['generate']:.0%}",
        )
    console.print(table)
    explained, published = rows[0]["seconds"] / rows[-2]["seconds"], before / after
    console.print(
        f"published: {before:g} s → {after:g} s, {published:.2f} ×; predicted {explained:.2f} ×; "
        f"unexplained {published / explained:.2f} ×"
    )
