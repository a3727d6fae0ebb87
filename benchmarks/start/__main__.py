"""Where the seconds go from `millrace run` of the tiny preset, with a start model at hand, to its first optimizer step.

    start model, made once ─► campaign (not counted) ─► campaign ×5 ─► per process: what it reached when ─► medians
                                                             └─► processor time, and memory while it trains

Each campaign is stopped once it trains. `cpu` next to a moment is the processor time that its process used since the
moment before; it tells work from waiting, also on a busy machine.

    python -m benchmarks.start [--runs 5] [--model FOLDER] [--new-home] [--set KEY=VALUE …] [--json PATH]
"""

import functools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import add_settings, machine, make_parser, make_table, print_targets, write_json
from benchmarks.start.campaign import Campaign, run_campaign
from storage import layout

TARGET_SECONDS = 6.0
"""Until the first optimizer step, on two quiet cores."""


def main() -> None:
    """Runs the campaigns, prints their medians and writes them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="campaigns that are measured")
    parser.add_argument("--model", type=Path, help="the start model; without it, the first campaign makes one")
    parser.add_argument(
        "--new-home", action="store_true", help="no campaign finds a Prefect database of an earlier one"
    )
    add_settings(parser)
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}; expected at least 1")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        root = Path(folder)
        home = functools.partial(_prefect_home, root, new=arguments.new_home)
        model = arguments.model or root / "0" / layout.START_MODEL
        at_hand = [*arguments.set, f"model.path={model}"]
        run_campaign(root, "0", at_hand if arguments.model else arguments.set, home(0))
        measured = [run_campaign(root, str(n), at_hand, home(n)) for n in range(1, arguments.runs + 1)]
    result = {**report(measured), "new_home": arguments.new_home, "machine": machine()}
    _print(result)
    write_json(arguments.json, result)


def report(campaigns: Sequence[Campaign]) -> dict[str, Any]:
    """Medians over the campaigns, plain JSON. A moment that not every campaign reached is left out."""
    by_name = [{(moment.process, moment.what): moment for moment in one.moments} for one in campaigns]
    common = [name for name in by_name[0] if all(name in moments for moments in by_name)]
    figures = ("seconds", "since_last", "cpu_seconds")
    moments = [
        {
            "process": process,
            "what": what,
            **{f: statistics.median(getattr(one[process, what], f) for one in by_name) for f in figures},
        }
        for process, what in common
    ]
    first_step = [one["train-0", "first step done"].seconds for one in by_name]
    cpu = [sum(one.cpu_seconds.values()) for one in campaigns]
    pss = [sum(one.pss_bytes.values()) for one in campaigns]
    processes = dict.fromkeys(name for one in campaigns for name in one.cpu_seconds)
    return {
        "runs": len(campaigns),
        "first_step_seconds": _spread(first_step),
        "cpu_seconds": _spread(cpu),
        "pss_bytes": _spread(pss),
        "target_seconds": TARGET_SECONDS,
        "moments": moments,
        "processes": {
            name: {
                "cpu_seconds": statistics.median(one.cpu_seconds.get(name, 0.0) for one in campaigns),
                "pss_bytes": statistics.median(one.pss_bytes.get(name, 0) for one in campaigns),
            }
            for name in processes
        },
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "each": list(values)}


def _prefect_home(root: Path, number: int, *, new: bool) -> Path:
    """PREFECT_HOME of campaign `number`."""
    return root / f"prefect-{number if new else 0}"


def _print(result: dict[str, Any]) -> None:
    console = Console()
    table = make_table("Seconds since `millrace run`", ("", "", "at", "since the last", "cpu"))
    for name in result["processes"]:
        moments = [moment for moment in result["moments"] if moment["process"] == name]
        for number, moment in enumerate(moments):
            figures = (f"{moment[figure]:.2f}" for figure in ("seconds", "since_last", "cpu_seconds"))
            table.add_row("" if number else name, moment["what"], *figures, end_section=number == len(moments) - 1)
    console.print(table)
    processes = make_table("Each process", ("", "cpu until the first step, s", "memory (PSS), MB"))
    for name, figures in result["processes"].items():
        processes.add_row(name, f"{figures['cpu_seconds']:.2f}", f"{figures['pss_bytes'] / 1e6:.0f}")
    processes.add_row("all", f"{result['cpu_seconds']['median']:.2f}", f"{result['pss_bytes']['median'] / 1e6:.0f}")
    console.print(processes)
    seconds = result["first_step_seconds"]
    console.print(
        f"first optimizer step after {seconds['median']:.2f} s: median of {result['runs']}, "
        f"{min(seconds['each']):.2f} to {max(seconds['each']):.2f}",
        soft_wrap=True,
    )
    print_targets(console, {f"first step within {TARGET_SECONDS:.0f} s": seconds["median"] <= TARGET_SECONDS})


if __name__ == "__main__":
    main()
