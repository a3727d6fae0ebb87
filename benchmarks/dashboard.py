"""What the dashboard takes: to show a run of a million trajectories, to go on showing it, and from a live campaign.

    a stored run, made once ─► a fresh process ─► first look, every view ─► a part more ─► look again, every view
    the tiny campaign, in turns ─► alone, with a dashboard, with a dashboard that is watched ─► seconds per step

Times are medians over the rounds; `first` is the look and the first view together, as on the page that opens.

    python -m benchmarks.dashboard [--folder FOLDER] [--trajectories 1000000] [--rounds 3] [--json PATH]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.stored_run import Shape, StoredRun
from storage.factory import open_store

TARGETS = {"first_seconds": 3.0, "refresh_seconds": 0.5, "peak_bytes": 1e9, "slowdown": 1.01}
_GROUPS_PER_STEP, _GROUP_SIZE, _GENERATORS = 125, 8, 5
_PER_STEP = _GROUPS_PER_STEP * _GROUP_SIZE
_STEPS_A_CHECKPOINT = 20
_FIRST_VIEW = "staleness"
_PAGE_SECONDS = 1.0


def main() -> None:
    """Measures, prints the tables and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the stored run lies, or is made; a temporary one if absent")
    parser.add_argument("--trajectories", type=int, default=1_000_000, help=f"of the stored run, {_PER_STEP} a step")
    parser.add_argument("--rounds", type=int, default=3, help="how often each thing is measured")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each campaign; 0: run none")
    parser.add_argument("--warmup", type=int, default=10, help="first steps that are not timed")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    if arguments.trajectories < _PER_STEP or arguments.rounds < 1:
        parser.error(f"expected at least {_PER_STEP} trajectories, and one round")
    if 0 < arguments.steps < arguments.warmup + 2:
        parser.error(f"--steps is {arguments.steps}; expected at least two more than --warmup, {arguments.warmup}")
    result: dict[str, Any] = {"machine": {"platform": platform.platform(), "cores": os.cpu_count()}}
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as temporary:
        folder = arguments.folder or Path(temporary)
        result["stored"] = measure_stored(folder / "stored", arguments.trajectories, arguments.rounds)
        if arguments.steps:
            # It needs a browser; the rest does not.
            from benchmarks.dashboard_live import measure_live

            result["live"] = measure_live(
                Path(temporary), steps=arguments.steps, warmup=arguments.warmup, rounds=arguments.rounds
            )
    result["targets"] = targets_met(result)
    _print(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def measure_stored(folder: Path, trajectories: int, rounds: int) -> dict[str, Any]:
    """Looks at the run in `folder`, made here unless it is there, in a fresh process a round; seconds and bytes."""
    started = time.perf_counter()
    run = _stored_run(folder, trajectories)
    made = time.perf_counter() - started
    looks = [_looks(folder, run) for _ in range(rounds)]
    return {
        "trajectories": looks[0][0]["trajectories"],
        "making_seconds": made,
        "import_seconds": statistics.median(first["import_seconds"] for first, _ in looks),
        "first": _medians([first["seconds"] for first, _ in looks]),
        "refresh": _medians([again["seconds"] for _, again in looks]),
        "first_seconds": statistics.median(_opening(first) for first, _ in looks),
        "refresh_seconds": statistics.median(_opening(again) for _, again in looks),
        "peak_bytes": max(again["peak_rss"] for _, again in looks),
        "bytes_before": min(first["rss_before"] for first, _ in looks),
    }


def targets_met(result: dict[str, Any]) -> dict[str, bool]:
    """Which of `TARGETS` the figures reach."""
    stored = result["stored"]
    met = {name: stored[name] <= TARGETS[name] for name in ("first_seconds", "refresh_seconds", "peak_bytes")}
    for name, ratio in result.get("live", {}).get("ratio", {}).items():
        met[f"slowdown, {name}"] = ratio <= TARGETS["slowdown"]
    return met


def _stored_run(folder: Path, trajectories: int) -> StoredRun:
    """The run, open for more; it grows by a step a round."""
    steps = trajectories // _PER_STEP
    # Room for the parts that are appended while it is looked at.
    shape = Shape(steps=2 * steps, groups_per_step=_GROUPS_PER_STEP, group_size=_GROUP_SIZE, generators=_GENERATORS)
    run = StoredRun(open_store(str(folder)), "stored", shape)
    while run.policy_version < steps:
        run.append(min(_STEPS_A_CHECKPOINT, steps - run.policy_version))
    return run


def _looks(folder: Path, run: StoredRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a fresh process tells of its first look at the run, and of one after a step more."""
    command = [sys.executable, "-m", "benchmarks.dashboard_look", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        run.append(1)
        # As a page does, which looks once a second: a reader asked again at once says what it knows already.
        time.sleep(_PAGE_SECONDS)
        process.stdin.write("again\n")
        process.stdin.flush()
        again = json.loads(process.stdout.readline())
        process.stdin.close()
    if again["trajectories"] <= first["trajectories"] or first["problems"] or again["problems"]:
        raise RuntimeError(f"the looks were not at a sound, growing run: {first} {again}")
    return first, again


def _opening(look: dict[str, Any]) -> float:
    seconds: dict[str, float] = look["seconds"]
    return seconds["look"] + seconds[_FIRST_VIEW]


def _medians(looks: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(look[name] for look in looks) for name in looks[0]}


def _print(result: dict[str, Any]) -> None:
    console = Console()
    stored = result["stored"]
    table = Table(title=f"Seconds, {stored['trajectories']:,} trajectories")
    for heading in ("", "first look", "with a part more"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, seconds in stored["first"].items():
        table.add_row(name, f"{seconds:.3f}", f"{stored['refresh'][name]:.3f}")
    console.print(table)
    console.print(
        f"the page that opens: {stored['first_seconds']:.2f} s, refreshed in {stored['refresh_seconds']:.3f} s; "
        f"at most {stored['peak_bytes'] / 1e6:.0f} MB, of which {stored['bytes_before'] / 1e6:.0f} MB before the run",
        soft_wrap=True,
    )
    if "live" in result:
        live = result["live"]
        table = Table(title="Milliseconds per optimizer step of a live campaign")
        for heading in ("", "by round", "÷ alone", "answers"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, seconds in live["seconds_per_step"].items():
            ratio = live["ratio"].get(name, 1.0)
            rounds = ", ".join(f"{1000 * value:.1f}" for value in seconds)
            table.add_row(name, rounds, f"{ratio:.3f}", ", ".join(map(str, live["answers"][name])))
        console.print(table)
    for name, met in result["targets"].items():
        console.print(f"target {'met   ' if met else 'MISSED'}  {name}")


if __name__ == "__main__":
    main()
