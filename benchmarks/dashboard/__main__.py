"""The cost of the dashboard: showing and updating a run of a million trajectories, and the load on a live campaign.

    a stored run, made once ─► a fresh process ─► first look, every view ─► one more part ─► look again, every view
    the tiny campaign, in turns ─► alone, with a dashboard, with an open page ─► seconds per step

Times are medians over the rounds; `first` is the look and the first view together, as when the page opens.

    python -m benchmarks.dashboard [--folder FOLDER] [--trajectories 1000000] [--rounds 3] [--json PATH]
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import machine, make_parser, make_table, print_targets, write_json
from benchmarks.stored_run.run import Shape, StoredRun
from storage.stores.factory import open_store

TARGETS = {"first_seconds": 3.0, "refresh_seconds": 0.5, "peak_bytes": 1e9, "slowdown": 1.01}
_GROUPS_PER_STEP, _GROUP_SIZE, _GENERATORS = 125, 8, 5
_PER_STEP = _GROUPS_PER_STEP * _GROUP_SIZE
_STEPS_PER_CHECKPOINT = 20
_FIRST_VIEW = "staleness"
_PAGE_SECONDS = 1.0


def main() -> None:
    """Measures, prints the tables and writes the figures as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the stored run (default: a temporary one)")
    parser.add_argument("--trajectories", type=int, default=1_000_000, help=f"of the stored run, {_PER_STEP} per step")
    parser.add_argument("--rounds", type=int, default=3, help="how often each thing is measured")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each campaign; 0: run none")
    parser.add_argument("--warmup", type=int, default=10, help="first steps that are not timed")
    arguments = parser.parse_args()
    if arguments.trajectories < _PER_STEP or arguments.rounds < 1:
        parser.error(f"expected at least {_PER_STEP} trajectories, and one round")
    if 0 < arguments.steps < arguments.warmup + 2:
        parser.error(f"--steps is {arguments.steps}; expected at least two more than --warmup, {arguments.warmup}")
    result: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as temporary:
        folder = arguments.folder or Path(temporary)
        result["stored"] = measure_stored(folder / "stored", arguments.trajectories, arguments.rounds)
        if arguments.steps:
            # It needs a browser; the rest does not.
            from benchmarks.dashboard.live import measure_live

            result["live"] = measure_live(
                Path(temporary), steps=arguments.steps, warmup=arguments.warmup, rounds=arguments.rounds
            )
    result["targets"] = targets_met(result)
    _print(result)
    write_json(arguments.json, result)


def measure_stored(folder: Path, trajectories: int, rounds: int) -> dict[str, Any]:
    """Reads the run in `folder`, created if missing, in one fresh process per round; seconds and bytes."""
    started = time.perf_counter()
    run = _stored_run(folder, trajectories)
    making = time.perf_counter() - started
    looks = [_looks(folder, run) for _ in range(rounds)]
    return {
        "trajectories": looks[0][0]["trajectories"],
        "making_seconds": making,
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
    """The run, open for appending; it grows by one step per round."""
    steps = trajectories // _PER_STEP
    # Room for the parts that are appended during the measurement.
    shape = Shape(steps=2 * steps, groups_per_step=_GROUPS_PER_STEP, group_size=_GROUP_SIZE, generators=_GENERATORS)
    run = StoredRun(open_store(str(folder)), "stored", shape)
    while run.policy_version < steps:
        run.append(min(_STEPS_PER_CHECKPOINT, steps - run.policy_version))
    return run


def _looks(folder: Path, run: StoredRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of a fresh process for its first look at the run, and for one after another step."""
    command = [sys.executable, "-m", "benchmarks.dashboard.look", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        run.append(1)
        # As a page, which looks once per second: a reader asked sooner returns its previous data.
        time.sleep(_PAGE_SECONDS)
        process.stdin.write("again\n")
        process.stdin.flush()
        again = json.loads(process.stdout.readline())
        process.stdin.close()
    if again["trajectories"] <= first["trajectories"] or first["problems"] or again["problems"]:
        raise RuntimeError(f"expected an undamaged run that grows, but the looks returned: {first} {again}")
    return first, again


def _opening(look: dict[str, Any]) -> float:
    seconds: dict[str, float] = look["seconds"]
    return seconds["look"] + seconds[_FIRST_VIEW]


def _medians(looks: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(look[name] for look in looks) for name in looks[0]}


def _print(result: dict[str, Any]) -> None:
    console = Console()
    stored = result["stored"]
    title = f"Seconds, {stored['trajectories']:,} trajectories"
    table = make_table(title, ("", "first look", "after another part"))
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
        title = "Milliseconds per optimizer step of a live campaign"
        table = make_table(title, ("", "by round", "÷ alone", "answers"))
        for name, seconds in live["seconds_per_step"].items():
            ratio = live["ratio"].get(name, 1.0)
            rounds = ", ".join(f"{1000 * value:.1f}" for value in seconds)
            table.add_row(name, rounds, f"{ratio:.3f}", ", ".join(map(str, live["answers"][name])))
        console.print(table)
    print_targets(console, result["targets"])


if __name__ == "__main__":
    main()
