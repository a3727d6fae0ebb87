"""The cost of the controller: a real campaign whose stages sleep instead of working.

    benchmark ─► Prefect server of its own, with an empty database
        │
        └─► campaign ─► tasks ─► the stages' own programs, with sleepers for engine, reward and trainer
               │
               ├─ start ───────┤ trainer ready ├─ training ──────────┤ last step ├─ end ─┤
               └ footprint     └ footprint                           └ footprint         └ footprint

    ideal = (steps − 1) · longest sleep of a step, from the end of the first step to the end of the last

A footprint is the CPU time of the controller and of the server, and the rows of the server's database. Everything but
the sleeps is real: streams, commits, ledger, checkpoints, weight sync, status, evaluation and promotion.

python -m benchmarks.controller [--steps 100] [--generate 0.5] [--score 0.1] [--train 0.4] [--json PATH]
"""

import atexit
import functools
import os
import platform
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.async_vs_sync import step_times
from benchmarks.report import make_parser, write_json
from benchmarks.sleeping.campaign import sleepers
from benchmarks.sleeping.pace import Pace
from configs.schema import RunConfig
from flows.deployment.server import prefect_server
from storage.progress import read_status
from storage.stores.factory import open_store

TARGET = 1.03
"""Times the ideal, at most."""
PHASES = ("start", "training", "end")

_GROUP_SIZE, _GROUPS_PER_STEP = 2, 2
_LOOK_SECONDS = 0.1
_LOCKED_SECONDS = 30.0
"""How long to wait for the server's writes before counting its rows."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What the controller and its server have used up to one moment."""

    controller_cpu_seconds: float
    server_cpu_seconds: float
    rows: dict[str, int]
    """Of each table of the server's database."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A finished campaign."""

    called: float
    """When the flow was called, unix seconds."""
    ready: float
    """When its trainer was ready."""
    steps: list[float]
    """When each optimizer step ended."""
    returned: float
    """When the flow had returned."""
    footprints: tuple[Footprint, Footprint, Footprint, Footprint]
    """At the call, with the trainer ready, after the last step, and at the return; each taken slightly later."""
    busy_seconds: dict[str, float]
    """Busy time of each stage, including sleeps, also for rollouts that the trainer did not take any more."""


def main() -> None:
    """Runs the campaign, prints what it cost and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--generate", type=float, default=0.5, help="seconds per step that the generator sleeps")
    parser.add_argument("--score", type=float, default=0.1, help="seconds per step that the scorer sleeps")
    parser.add_argument("--train", type=float, default=0.4, help="seconds per step that the trainer sleeps")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps is {arguments.steps}; expected at least 2")
    pace = Pace(
        generate=arguments.generate,
        score=arguments.score,
        train=arguments.train,
        rollouts_per_step=_GROUP_SIZE * _GROUPS_PER_STEP,
    )
    folder = Path(tempfile.mkdtemp(prefix="millrace-benchmark-"))
    # Registered before the server's own exit handler, so it runs after it: the server's database is in the folder.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    result = report(run(folder, pace, arguments.steps), pace)
    _print(result)
    write_json(arguments.json, result)


def run(folder: Path, pace: Pace, steps: int) -> Campaign:
    """Runs a campaign in `folder`, with a Prefect server of its own that ends with this process."""
    os.environ["PREFECT_HOME"] = str(folder / "prefect")
    for name in ("PREFECT_API_URL", "PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL"):
        os.environ.pop(name, None)
    pace.to_environment()
    run_url = folder / "sleeping"
    over = threading.Event()
    with prefect_server() as wait_for_server, sleepers(), ThreadPoolExecutor(1) as pool:
        # Imported late: the server must have been started before anything imports Prefect.
        from flows.campaign.flow import campaign

        wait_for_server()
        look = functools.partial(_footprint, _server(), folder / "prefect" / "prefect.db")
        first = look()
        called = time.time()
        marks = pool.submit(_while_training, str(run_url), steps, look, over)
        try:
            status = campaign(_config(folder, steps), run_url.name)
        finally:
            over.set()
        returned = time.time()
        ready, last = marks.result()
        assert isinstance(status, dict)
        return Campaign(
            called=called,
            ready=read_status(open_store(str(run_url)), "train", 0)["t_ready"],
            steps=step_times(run_url),
            returned=returned,
            footprints=(first, ready, last, look()),
            busy_seconds=status["seconds"],
        )


def report(campaign: Campaign, pace: Pace) -> dict[str, Any]:
    """The figures, plain JSON."""
    steps, looks = campaign.steps, campaign.footprints
    seconds, ideal = steps[-1] - steps[0], (len(steps) - 1) * pace.step_seconds
    wall = _grown([campaign.called, campaign.ready, steps[-1], campaign.returned])
    rows = {table: _grown([look.rows[table] for look in looks]) for table in sorted(looks[0].rows)}
    return {
        "steps": len(steps),
        "sleeps": {stage: getattr(pace, stage) for stage in ("generate", "score", "train")},
        "seconds": seconds,
        "ideal_seconds": ideal,
        "ratio": seconds / ideal,
        "target": TARGET,
        "wall_seconds": {**wall, "campaign": campaign.returned - campaign.called},
        "cpu_seconds": {
            "controller": _grown([look.controller_cpu_seconds for look in looks]),
            "server": _grown([look.server_cpu_seconds for look in looks]),
        },
        "busy_seconds": campaign.busy_seconds,
        "rows": {
            table: {**grown, "training_per_hour": grown["training"] * 3600 / wall["training"]}
            for table, grown in rows.items()
            if any(grown.values())
        },
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
    }


def _grown(moments: Sequence[float]) -> dict[str, float]:
    """The increase in each phase, from the values at the four moments that delimit the phases."""
    return {phase: moments[i + 1] - moments[i] for i, phase in enumerate(PHASES)}


def _config(root: Path, steps: int) -> RunConfig:
    """Everything as small as possible, so that only the sleeps take long."""
    return RunConfig.model_validate(
        {
            "name": "sleeping",
            "model": {
                "bootstrap": {
                    "hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8,
                    "max_steps": 1, "batch_size": 1, "threads": 1,
                }
            },
            "prompts": {"num_eval": 4, "arithmetic": {"digits": 1, "max_sum": 9}},
            # A batch is a whole step, because each batch has a cost besides the sleep.
            "generation": {"group_size": _GROUP_SIZE, "groups_per_batch": _GROUPS_PER_STEP, "max_new_tokens": 1},
            "training": {"max_steps": steps, "groups_per_step": _GROUPS_PER_STEP},
            "staleness": {"max_staleness": 2},
            "evaluation": {"num_prompts": 4},
            "storage": {"root": str(root)},
        }
    )  # fmt: skip


def _server() -> psutil.Process:
    """The private Prefect server of this process."""
    return next(child for child in psutil.Process().children() if "flows.deployment.server" in child.cmdline())


def _footprint(server: psutil.Process, database: Path) -> Footprint:
    cpu = server.cpu_times()
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=_LOCKED_SECONDS)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
    return Footprint(controller_cpu_seconds=time.process_time(), server_cpu_seconds=cpu.user + cpu.system, rows=rows)


def _while_training(run_url: str, steps: int, look: Callable[[], Footprint], over: threading.Event) -> list[Footprint]:
    """One footprint when the trainer is ready, one after its last step; fewer if `over` is set first."""
    store = open_store(run_url)
    found: list[Footprint] = []
    for version in (0, steps):
        while read_status(store, "train", 0).get("policy_version", -1) < version:
            if over.wait(_LOOK_SECONDS):
                return found
        found.append(look())
    return found


def _print(result: dict[str, Any]) -> None:
    console = Console()
    seconds = Table("", *PHASES, title="Seconds")
    seconds.add_row("wall", *(f"{result['wall_seconds'][phase]:.1f}" for phase in PHASES))
    for process, cpu in result["cpu_seconds"].items():
        seconds.add_row(f"CPU of the {process}", *(f"{cpu[phase]:.2f}" for phase in PHASES))
    console.print(seconds)
    rows = Table("table", *PHASES, "an hour of training", title="Rows added to Prefect's database")
    for table, grown in result["rows"].items():
        rows.add_row(table, *(str(grown[phase]) for phase in PHASES), f"{grown['training_per_hour']:,.0f}")
    console.print(rows)
    verdict = "met" if result["ratio"] <= TARGET else "missed"
    console.print(
        f"{result['steps']} steps, from the first to the last: {result['seconds']:.2f} s, ideal "
        f"{result['ideal_seconds']:.2f} s, ratio {result['ratio']:.3f}; target ≤ {TARGET}: {verdict}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
