"""How long `millrace run` of the tiny preset takes until its first optimizer step, with a start model at hand.

    start model, made once ─► campaign (not counted) ─► campaign ×5 ─► seconds, processor time, memory ─► medians

Each campaign is stopped after a few steps. All use one Prefect database. Memory is the proportional set size: a page
that n processes share counts 1/n in each.

    python -m benchmarks.start [--runs 5] [--model FOLDER] [--set KEY=VALUE …] [--json PATH]
"""

import signal
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute as pc

from benchmarks.harness import (
    add_settings,
    campaign_command,
    campaign_environment,
    finish,
    make_parser,
    print_line,
    print_table,
    read_rows,
)
from storage import layout
from storage.progress import read_progress, read_status
from storage.schema import CONSUMED
from storage.stores.factory import open_store

TARGET_SECONDS = 6.0
"""Until the first optimizer step, on two quiet cores."""
_STEPS = 5
"""Memory is measured after this many steps: by then every stage has done all of its work once."""
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 600.0


def main() -> None:
    """Runs the campaigns, prints their medians and writes them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="campaigns that are measured")
    parser.add_argument("--model", type=Path, help="the start model; without it, the first campaign makes one")
    add_settings(parser)
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}; expected at least 1")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        root = Path(folder)
        at_hand = [*arguments.set, f"model.path={arguments.model or root / '0' / layout.START_MODEL}"]
        run_campaign(root, "0", at_hand if arguments.model else arguments.set)
        campaigns = [run_campaign(root, str(n), at_hand) for n in range(1, arguments.runs + 1)]
    result = report(campaigns)
    _print(result)
    finish(arguments.json, result)


def run_campaign(root: Path, run_id: str, settings: Sequence[str]) -> dict[str, Any]:
    """Runs it in the folder `root` until it has made a few steps.

    Returns `first_step_seconds`, and by process `cpu_seconds` and `pss_bytes`. Raises RuntimeError if it ends before.
    """
    log_path = root / f"{run_id}.log"
    t_called = time.time()
    with log_path.open("w") as log:
        controller = psutil.Popen(
            campaign_command(root / run_id, settings),
            env=campaign_environment(root),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    store = open_store(str(root / run_id))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    try:
        while read_status(store, "train", 0).get("policy_version", 0) < _STEPS:
            if controller.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the campaign does not train:\n{log_path.read_text()[-2000:]}")
            time.sleep(_POLL_SECONDS)
        stages = {record["pid"]: name for name, record in read_progress(store).items() if "pid" in record}
        usage = _usage(controller, stages)
    finally:
        controller.send_signal(signal.SIGTERM)
        controller.wait()
    consumed = read_rows(root / run_id, layout.CONSUMED, CONSUMED)
    first_step = consumed.filter(pc.field("policy_version") == 1)
    return {"first_step_seconds": first_step["t"][0].as_py() - t_called, **usage}


def _usage(controller: psutil.Process, stages: dict[int, str]) -> dict[str, dict[str, float]]:
    """Returns `cpu_seconds` (until now, ended children included) and `pss_bytes` by process."""
    usage: dict[str, dict[str, float]] = {"cpu_seconds": defaultdict(float), "pss_bytes": defaultdict(float)}
    for process in (controller, *controller.children(recursive=True)):
        # It may end at any time.
        with suppress(psutil.Error):
            cpu, command = process.cpu_times(), process.cmdline()
            name = "controller" if process.pid == controller.pid else stages.get(process.pid) or _module(command)
            usage["cpu_seconds"][name] += cpu.user + cpu.system + cpu.children_user + cpu.children_system
            usage["pss_bytes"][name] += process.memory_full_info().pss
    return usage


def _module(command: Sequence[str]) -> str:
    """Names a process: `python -m MODULE …` by its module, anything else by its program."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return Path(command[0]).name if command else "others"


def report(campaigns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Computes medians over the campaigns."""

    def spread(values: Sequence[float]) -> dict[str, Any]:
        return {"median": statistics.median(values), "each": list(values)}

    names = dict.fromkeys(name for campaign in campaigns for name in campaign["cpu_seconds"])
    usage = ("cpu_seconds", "pss_bytes")
    first_step = spread([campaign["first_step_seconds"] for campaign in campaigns])
    return {
        "runs": len(campaigns),
        "first_step_seconds": first_step,
        **{figure: spread([sum(campaign[figure].values()) for campaign in campaigns]) for figure in usage},
        "target_seconds": TARGET_SECONDS,
        "targets": {f"first step within {TARGET_SECONDS:.0f} s": first_step["median"] <= TARGET_SECONDS},
        "processes": {
            name: {
                figure: statistics.median(campaign[figure].get(name, 0) for campaign in campaigns) for figure in usage
            }
            for name in names
        },
    }


def _print(result: dict[str, Any]) -> None:
    processes = {
        **result["processes"],
        "all": {figure: result[figure]["median"] for figure in ("cpu_seconds", "pss_bytes")},
    }
    print_table(
        f"After {_STEPS} steps",
        ("", "processor time, s", "memory (PSS), MB"),
        [
            [name, f"{figures['cpu_seconds']:.2f}", f"{figures['pss_bytes'] / 1e6:.0f}"]
            for name, figures in processes.items()
        ],
    )
    seconds = result["first_step_seconds"]
    print_line(
        f"first optimizer step after {seconds['median']:.2f} s: median of {result['runs']}, "
        f"{min(seconds['each']):.2f} to {max(seconds['each']):.2f}"
    )


if __name__ == "__main__":
    main()
