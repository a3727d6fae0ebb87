"""How fast a killed stage works again.

    millrace run tiny ─► each stage process in turn: SIGKILL ─► its successor is ready ─► seconds, by stage
                     └─► after the last kill: SIGTERM, --resume to one more step ─► the ledger balances, no process left

There are two generators and two scorers. A process is killed twice a minute at most, because the third death within a
minute ends a campaign.

    python -m benchmarks.recovery [--kills 100] [--set KEY=VALUE …] [--json PATH]
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import add_settings, campaign_command, campaign_environment, finish, make_parser, print_table
from storage.progress import read_progress
from storage.stores.factory import open_store

TARGET_SECONDS = 0.5
"""Median of each stage, from the kill until the successor is ready."""
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
_POLL_SECONDS = 0.02

Recoveries = dict[str, list[tuple[float, float]]]
"""By stage: (seconds from the kill until its successor was ready, the part of it that loading the model took)."""


def main() -> None:
    """Runs the campaign, kills its stages, and prints how long each took to come back."""
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="kills in total (default: 100)")
    add_settings(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-recovery-") as folder:
        run = Path(folder) / "runs" / "killed"
        recoveries, left = _run_and_kill(run, arguments.kills, arguments.set)
        ledger = json.loads((run / "summary.json").read_text())["ledger"]
    _report(recoveries, ledger, left, arguments.json)


def _run_and_kill(run: Path, kills: int, settings: Sequence[str]) -> tuple[Recoveries, list[int]]:
    """Returns the recoveries of a campaign's stages, and the ids of processes that its end left behind."""
    seen: set[int] = set()
    recoveries: Recoveries = defaultdict(list)
    with _running(run, [*_SETTINGS, *settings, "training.max_steps=100000"]) as controller:
        records = _wait_until_ready(run, {})
        for stage in itertools.islice(itertools.cycle(_STAGES), kills):
            pid = records[stage]["pid"]
            seen |= {record["pid"] for record in records.values()}
            t_killed = time.time()
            os.kill(pid, signal.SIGKILL)
            records = _wait_until_ready(run, {stage: pid})
            successor = records[stage]
            kind = stage.rpartition("-")[0]
            recoveries[kind].append((successor["t_ready"] - t_killed, successor["load_seconds"]))
            time.sleep(_APART_SECONDS)
        seen |= {child.pid for child in controller.children(recursive=True)}
    steps = read_progress(open_store(str(run)))["train-0"]["policy_version"] + 1
    with _running(run, [*_SETTINGS, *settings, f"training.max_steps={steps}"], "--resume") as controller:
        controller.wait()
    return recoveries, [pid for pid in seen if psutil.pid_exists(pid)]


@contextmanager
def _running(run: Path, settings: Sequence[str], *flags: str) -> Iterator[psutil.Popen]:
    """Runs a campaign during the block, and asks it to stop at the end."""
    command = campaign_command(run, settings, *flags)
    run.parent.mkdir(parents=True, exist_ok=True)
    with psutil.Popen(command, stdout=subprocess.DEVNULL, env=campaign_environment(run.parent)) as controller:
        yield controller
        with suppress(psutil.NoSuchProcess):
            controller.terminate()


def _wait_until_ready(run: Path, dead: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Returns the status record of each stage once all are ready, the dead ones replaced. Raises TimeoutError."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        status = read_progress(open_store(str(run))) if run.exists() else {}
        records = {stage: status[stage] for stage in _STAGES if status.get(stage, {}).get("t_ready")}
        if len(records) == len(_STAGES) and all(records[stage]["pid"] != pid for stage, pid in dead.items()):
            return records
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"not every stage was ready after {_PATIENCE_SECONDS:.0f} s; killed before: {dead}")


def _report(recoveries: Recoveries, ledger: Mapping[str, Any], left: Sequence[int], path: Path | None) -> None:
    rows = {}
    for stage, times in recoveries.items():
        totals, loads = zip(*times, strict=True)
        rows[stage] = {
            "kills": len(times),
            "median_seconds": statistics.median(totals),
            "longest_seconds": max(totals),
            "load_seconds": statistics.median(loads),
        }
    parts = [ledger["trained"], ledger["buffered"], ledger["in_flight"], *ledger["dropped"].values()]
    exact = all(sum(part[unit] for part in parts) == ledger["generated"][unit] for unit in ("rollouts", "tokens"))
    print_table(
        "From SIGKILL until the successor is ready",
        ("", "kills", "median s", "longest s", "load s"),
        [[stage, str(row["kills"]), *(f"{row[key]:.2f}" for key in list(row)[1:])] for stage, row in rows.items()],
    )
    fast = all(row["median_seconds"] <= TARGET_SECONDS for row in rows.values())
    targets = {
        f"median of each stage at most {TARGET_SECONDS:g} s": fast,
        "ledger exact": exact,
        "no process left behind": not left,
    }
    finish(path, {"stages": rows, "ledger_exact": exact, "left_behind": len(left), "targets": targets})


if __name__ == "__main__":
    main()
