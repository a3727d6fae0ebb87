"""What a push of weights costs at scale, by its plan: no GPU, no tensor, only shapes.

shapes ─► layouts of trainer and generators ─► plan_transfer ─► bytes of each rank, balance, memory ─► time at the
                                                                                             links' assumed rates

python -m benchmarks.weight_plan [--models 8b 405b] [--trainers 64 1024] [--generators 1 128] [--workers 8 16]
python -m benchmarks.weight_plan --nvlink 900 --network 100 --bucket 128 --dtype float8_e4m3fn
"""

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import machine, make_parser, make_table, print_targets, write_json
from benchmarks.weight_plan.costs import Case, Links, cost
from benchmarks.weight_plan.models import MODELS
from millrace.errors import InputError

DEFAULT_CASES = {
    "4b": [(8, 2, 4)],
    "8b": [(8, 1, 1), (8, 1, 8), (8, 16, 1), (64, 8, 8), (64, 64, 1), (256, 128, 1), (1024, 128, 8)],
    "70b": [(64, 1, 8), (64, 8, 8), (256, 16, 8), (256, 32, 16), (1024, 128, 8)],
    "405b": [(256, 1, 16), (512, 32, 16), (1024, 64, 8), (1024, 128, 16)],
}
"""(trainer ranks, generators, workers of each) by model."""
PUBLISHED = {
    "LlamaRL (arXiv 2505.24034)": {"8b": "0.04", "70b": "1.15", "405b": "2.31"},
    "NeMo-RL (pull requests 2413, 2971)": {"4b": "0.07 to 0.34", "397B mixture": "2.0 to 2.2"},
}
"""Seconds of a weight update, as their authors measured them on H100."""
TARGETS = {"planning": 2.0, "balance": 1.1}
"""Most seconds for a plan, and most bytes of the busiest rank, divided by the mean."""


def main() -> None:
    """Computes, prints the tables and writes the figures as JSON."""
    arguments = _parse()
    links = Links(
        nvlink=arguments.nvlink, network=arguments.network, message_us=arguments.message_us, copy_us=arguments.copy_us
    )
    try:
        rows = [
            cost(case, links, bucket_bytes=arguments.bucket << 20, dtype=arguments.dtype) for case in _cases(arguments)
        ]
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    console = Console(width=200)
    console.print(_table(rows, links))
    for who, times in PUBLISHED.items():
        console.print(f"{who}: " + ", ".join(f"{model} {seconds} s" for model, seconds in times.items()))
    targets = targets_met(rows)
    print_targets(console, targets)
    result = {"machine": machine(), "links": vars(links), "bucket_mb": arguments.bucket, "dtype": arguments.dtype}
    write_json(arguments.json, {**result, "rows": rows, "published": PUBLISHED, "targets": targets})


def targets_met(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Which of `TARGETS` all rows meet."""
    balance = max(max(row["sent_balance"], row["received_balance"]) for row in rows)
    planning = max(row["planning"] for row in rows)
    return {
        f"a plan takes at most {TARGETS['planning']:g} s: {planning:.2f} s": planning <= TARGETS["planning"],
        f"busiest rank, of the mean, at most {TARGETS['balance']:g}: {balance:.3f}": balance <= TARGETS["balance"],
    }


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    for name, what in (("trainers", "trainer ranks"), ("generators", "generators"), ("workers", "workers of each")):
        parser.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=f"{what}, instead of the default cases")
    parser.add_argument("--trainer-tensor", type=int, metavar="N", help="tensor ranks of the trainer")
    parser.add_argument("--nvlink", type=float, default=450.0, help="GB/s of a GPU within a host")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s of a GPU between hosts")
    parser.add_argument("--message-us", type=float, default=20.0, help="microseconds of each message besides its bytes")
    parser.add_argument("--copy-us", type=float, default=5.0, help="microseconds to copy a region to or from a bucket")
    parser.add_argument("--bucket", type=int, default=64, metavar="MIB", help="largest message")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float8_e4m3fn"))
    arguments = parser.parse_args()
    grid = (arguments.trainers, arguments.generators, arguments.workers)
    if any(grid) and not all(grid):
        parser.error("expected --trainers, --generators and --workers together")
    numbers = [*(arguments.trainers or ()), *(arguments.generators or ()), *(arguments.workers or ()), arguments.bucket]
    if min([*numbers, arguments.trainer_tensor or 1]) < 1 or min(arguments.nvlink, arguments.network) <= 0:
        parser.error("expected at least 1 of everything, and rates above 0")
    return arguments


def _cases(arguments: argparse.Namespace) -> list[Case]:
    return [
        _case(model, ranks, generators, workers, arguments.trainer_tensor)
        for model in arguments.models
        for ranks, generators, workers in (
            DEFAULT_CASES[model]
            if not arguments.trainers
            else [(t, g, w) for t in arguments.trainers for g in arguments.generators for w in arguments.workers]
        )
    ]


def _case(model: str, ranks: int, generators: int, workers: int, tensor: int | None) -> Case:
    shape, usual = MODELS[model]
    tensor = tensor or min(usual, ranks)
    if ranks % tensor:
        raise InputError(f"{ranks} trainer ranks can't be divided into rows of {tensor}")
    return Case(model=shape, trainer_ranks=ranks, trainer_tensor=tensor, generators=generators, workers=workers)


def _table(rows: list[dict[str, Any]], links: Links) -> Table:
    headings = (
        "",
        "trainer",
        "generators",
        "chains",
        "sends",
        "gets, sends",
        "balance",
        "extra",
        "copies",
        "network",
        "NVLink",
    )
    title = f"GB of the busiest ranks; seconds at {links.network:g} and {links.nvlink:g} GB/s"
    table = make_table(title, (*headings, "hop by hop", "plan"))
    for row in rows:
        simulated = row.get("simulated_over_span")
        table.add_row(
            f"{row['model']}, {row['model_gb']:.0f} GB",
            f"{row['trainer_ranks'] // row['trainer_tensor']} × {row['trainer_tensor']}",
            f"{row['generators']} × {row['workers']}",
            str(row["chains"]),
            f"{row['trainer_sends_gb']:.2f}",
            f"{row['worker_receives_gb']:.2f}, {row['worker_sends_gb']:.2f}",
            f"{row['sent_balance']:.3f}, {row['received_balance']:.3f}",
            f"{row['trainer_extra_gb']:.2f}, {row['worker_extra_gb']:.2f}",
            f"{row['copies']:,}",
            f"{row['over_network']:.3f}",
            f"{row['over_nvlink']:.3f}",
            "" if simulated is None else f"{simulated:.2f}",
            f"{row['planning']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
