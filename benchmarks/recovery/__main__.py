"""How fast a killed stage is back: `python -m benchmarks.recovery --kills 100`.

    millrace run tiny ─► every stage process in turn: SIGKILL ─► its successor is ready ─► seconds, by stage
                     └─► after the last kill: SIGTERM, --resume to one more step ─► the ledger balances, no orphan

There are two generators and two scorers. A process is killed twice a minute at most, because the third death within a
minute ends a campaign.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.recovery.monitor import Recovery, RecoveryMonitor
from benchmarks.report import add_settings, machine, make_parser, make_table, print_targets, write_json
from storage.progress import read_progress
from storage.stores.factory import open_store

PRESET = Path(__file__).parents[2] / "configs" / "presets" / "tiny-cpu.yaml"
TARGET_SECONDS = 0.5
"""Median of each stage, everything included."""
_STAGES = ("score-0", "sync_weights-0", "generate-0", "score-1", "train-0", "generate-1")
_SETTINGS = (
    "generation.replicas=2",
    "scoring.replicas=2",
    # Deaths are counted within four times this, and at least within a minute.
    "supervision.hang_seconds=15",
)
_APART_SECONDS = 5.0
"""Between a recovery and the next kill, so that each process dies at most twice a minute."""
_PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.02


def main() -> None:
    """Runs the campaign, kills its stages, and prints what came of it."""
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="kills in total (default: 100)")
    add_settings(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-recovery-") as folder:
        run = Path(folder) / "runs" / "killed"
        recoveries, left = _campaign(run, arguments.kills, arguments.set)
        ledger = json.loads((run / "summary.json").read_text())["ledger"]
    _report(recoveries, ledger, left, arguments.json)


def _campaign(run: Path, kills: int, settings: Sequence[str]) -> tuple[list[Recovery], list[int]]:
    """The recoveries of a campaign's stages, and the process ids that its end left behind."""
    seen: set[int] = set()
    killed: list[tuple[str, float]] = []
    with (
        RecoveryMonitor(str(run)) as monitor,
        _running(run, [*_SETTINGS, *settings, "training.max_steps=100000"]) as controller,
    ):
        pids = _ready(run, {})
        for stage in itertools.islice(itertools.cycle(_STAGES), kills):
            seen |= set(pids.values())
            killed.append((stage, time.time()))
            os.kill(pids[stage], signal.SIGKILL)
            pids = _ready(run, {stage: pids[stage]})
            time.sleep(_APART_SECONDS)
        seen |= set(pids.values()) | {child.pid for child in controller.children(recursive=True)}
    recoveries = monitor.recoveries(killed)
    steps = read_progress(open_store(str(run)))["train-0"]["policy_version"] + 1
    with _running(run, [*_SETTINGS, *settings, f"training.max_steps={steps}"], "--resume") as controller:
        controller.wait()
    return recoveries, [pid for pid in seen if psutil.pid_exists(pid)]


@contextmanager
def _running(run: Path, settings: Sequence[str], *flags: str) -> Iterator[psutil.Popen]:
    """A campaign while the block lasts; it is asked to stop at the block's end."""
    sets = [word for setting in settings for word in ("--set", setting)]
    command = ["run", str(PRESET), "--root", str(run.parent), "--run-id", run.name, *sets, *flags]
    with psutil.Popen([sys.executable, "-m", "flows.cli.main", *command], stdout=subprocess.DEVNULL) as controller:
        yield controller
        with suppress(psutil.NoSuchProcess):
            controller.terminate()


def _ready(run: Path, dead: Mapping[str, int]) -> dict[str, int]:
    """The process id of each stage, once all work and none is a dead one. Raises TimeoutError if that takes long."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        status = read_progress(open_store(str(run))) if run.exists() else {}
        pids = {stage: status[stage]["pid"] for stage in _STAGES if status.get(stage, {}).get("t_ready")}
        if len(pids) == len(_STAGES) and all(pids[stage] != pid for stage, pid in dead.items()):
            return pids
        time.sleep(_LOOK_SECONDS)
    raise TimeoutError(f"not every stage was at work after {_PATIENCE_SECONDS:.0f} s; killed before: {dead}")


def _report(recoveries: Sequence[Recovery], ledger: Mapping[str, Any], left: Sequence[int], path: Path | None) -> None:
    rows = {}
    for stage in dict.fromkeys(name.rpartition("-")[0] for name in _STAGES):
        found = [recovery for recovery in recoveries if recovery.stage.rpartition("-")[0] == stage]
        rows[stage] = {
            "kills": len(found),
            "median_seconds": statistics.median(recovery.total for recovery in found),
            "longest_seconds": max(recovery.total for recovery in found),
            "load_seconds": statistics.median(recovery.load for recovery in found),
        }
    parts = [ledger["trained"], ledger["buffered"], ledger["in_flight"], *ledger["dropped"].values()]
    exact = all(sum(part[unit] for part in parts) == ledger["generated"][unit] for unit in ("rollouts", "tokens"))
    table = make_table("From SIGKILL until the successor works", ["", "kills", "median s", "longest s", "load s"])
    for stage, row in rows.items():
        table.add_row(stage, str(row["kills"]), *(f"{row[key]:.2f}" for key in list(row)[1:]))
    console = Console()
    console.print(table)
    targets = {
        f"median of each stage at most {TARGET_SECONDS:g} s": all(
            row["median_seconds"] <= TARGET_SECONDS for row in rows.values()
        ),
        "ledger exact": exact,
        "no process left behind": not left,
    }
    print_targets(console, targets)
    write_json(path, {"stages": rows, "ledger_exact": exact, "left_behind": len(left), "machine": machine()})


if __name__ == "__main__":
    main()
