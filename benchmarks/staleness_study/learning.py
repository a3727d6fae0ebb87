"""Bounds, losses and adaptive control: a real policy learns, in the time of GPUs that two cores don't have.

    one start model per task ─► campaign aipo 1, seed 0        ─┐
                             ├─► campaign aipo adaptive, seed 0 ─┼─► seconds to each accuracy ─► tables, curves, JSON
                             └─► campaign ppo_clip 1, seed 0, … ─┘

Every campaign is the product's own stages on its own streams, with a policy that samples and learns; only the clock is
virtual (`benchmarks/virtual_time`). So waiting costs what it costs where each stage has a GPU of its own, and campaigns
run side by side without slowing each other down. A token of these tasks takes as long as hundreds of a model that
reasons. Finished campaigns are kept under --root.

In the task `disturbed` stages slow down while the campaign goes on, and nobody tells the controller. As in the
simulated study, a phase is judged by seconds per step ÷ effective sample size, the steps in which the controller still
finds out included; here the effective sample sizes are those of the policy's own ratios.

    python -m benchmarks.staleness_study.learning --root FOLDER [--tasks tiny,chain] [--losses aipo] [--seeds 3]
"""

import itertools
import json
import math
import multiprocessing
import shutil
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.report import machine, make_parser, make_table, write_json
from benchmarks.staleness_study.campaigns import Row, start_model
from benchmarks.staleness_study.comparison import ADAPTIVE, against_best, phase_losses
from benchmarks.staleness_study.control import medians
from benchmarks.staleness_study.curves import write_curves
from benchmarks.staleness_study.learning_tasks import TASKS, Task, costs_of, edges_of
from benchmarks.staleness_study.predicted import predicted_seconds_per_step
from benchmarks.staleness_study.time_to_accuracy import reached, smoothed
from benchmarks.virtual_time.policy import run_policy
from configs.load import load_config
from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.evaluation.results import ResultsReader
from millrace.runs.decisions import read_decisions
from millrace.runs.history import Step, read_steps
from storage.stores.local import LocalStore

_HIGHEST = 16
"""Highest bound of adaptive control."""
_ACCURACIES = (0.6, 0.65, 0.7, 0.75)
"""To which the time is shown."""
_BOUNDS = "0,1,2,4,8,16"
_ROW = "row.json"
"""Beside a campaign: its figures."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """One campaign of the study; it can be sent to another process."""

    task: str
    loss: str
    bound: str
    """A fixed one, or `ADAPTIVE`."""
    seed: int
    start: Path
    """Folder of the start model."""
    run: Path
    """Its own folder."""


def main() -> None:
    """Runs what is missing of the study, prints its tables, and writes the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the campaigns; finished ones are reused")
    parser.add_argument("--tasks", default="tiny,chain", help="comma-separated (default: tiny,chain)")
    parser.add_argument("--bounds", default=_BOUNDS, help=f"fixed bounds, comma-separated (default: {_BOUNDS})")
    parser.add_argument("--losses", default="aipo", help="comma-separated (default: aipo)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each, from 0 (default: 3)")
    parser.add_argument("--processes", type=int, default=2, help="campaigns side by side (default: 2)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the learning curves of the first loss as SVG")
    arguments = parser.parse_args()
    tasks, losses = arguments.tasks.split(","), arguments.losses.split(",")
    campaigns = study(arguments.root, tasks, losses, arguments.bounds.split(","), range(arguments.seeds))
    missing = [campaign for campaign in campaigns if not (campaign.run / _ROW).exists()]
    context = multiprocessing.get_context("spawn")
    # A process each: what torch keeps of one campaign is not the next one's.
    with ProcessPoolExecutor(arguments.processes, context, max_tasks_per_child=1) as processes:
        deque(processes.map(learned, missing), maxlen=0)
    rows = [learned(campaign) for campaign in campaigns]
    cells = medians(rows)
    compared, lost = against_best(cells), phase_losses(cells)
    _add_predictions(cells, campaigns)
    for task in tasks:
        _print([row for row in rows if row["task"] == task], cells)
        if len(TASKS[task].phases) > 1:
            _print_phases([(cell, losses) for cell, losses in zip(cells, lost, strict=True) if cell["task"] == task])
    _print_comparison(compared)
    if arguments.plot:
        targets = {task: TASKS[task].target for task in tasks}
        write_curves([row for row in rows if row["loss"] == losses[0]], targets, arguments.plot)
    write_json(
        arguments.json,
        {"cells": cells, "against_best": compared, "phase_losses": lost, "rows": rows, "machine": machine()},
    )


def study(
    root: Path, tasks: Sequence[str], losses: Sequence[str], bounds: Sequence[str], seeds: range
) -> list[Campaign]:
    """Its campaigns; seeds outermost, so that a study stopped early has every bound once."""
    starts = {task: start_model(root / task, Path(TASKS[task].preset)) for task in tasks}
    return [
        Campaign(
            task=task,
            loss=loss,
            bound=bound,
            seed=seed,
            start=starts[task],
            run=root / task / f"virtual-{loss}-{bound}-{seed}",
        )
        for seed in seeds
        for task in tasks
        for loss in losses
        for bound in (*bounds, ADAPTIVE)
        # Adaptive control is refused for a loss without ratios.
        if (loss, bound) != ("reinforce", ADAPTIVE)
    ]


def learned(campaign: Campaign) -> Row:
    """The figures of a campaign, which is run unless it is finished."""
    file = campaign.run / _ROW
    if not file.exists():
        shutil.rmtree(campaign.run, ignore_errors=True)
        store = LocalStore(campaign.run, fsync=False)
        config, task = config_of(campaign), TASKS[campaign.task]
        edges = edges_of(task, config.training.max_steps)
        run_policy(config, {edges[k]: costs_of(task, phase) for k, phase in enumerate(task.phases)}, store)
        file.write_text(json.dumps(measured(campaign, store)))
    row: Row = json.loads(file.read_text())
    return row


def config_of(campaign: Campaign) -> RunConfig:
    """The config of a campaign."""
    task, adaptive = TASKS[campaign.task], campaign.bound == ADAPTIVE
    highest = _HIGHEST if adaptive else int(campaign.bound)
    groups = load_config(task.preset, _assigned(task.settings)).training.groups_per_step
    settings = {
        "seed": campaign.seed,
        "model.path": str(campaign.start),
        "pipeline.mode": "async" if highest else "sync",
        "generation.groups_per_batch": groups * min(task.steps_in_flight, highest + 1),
        "training.loss": campaign.loss,
        "training.max_importance_ratio": 2.0,
        "training.checkpoint_every": 10**6,
        "staleness.control": "adaptive" if adaptive else "fixed",
        "staleness.max_staleness": highest,
        "promotion.margin": None,
        **task.settings,
    }
    return load_config(task.preset, _assigned(settings))


def _assigned(settings: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def measured(campaign: Campaign, store: LocalStore) -> Row:
    """The figures of a finished campaign. `seconds_to_target` is None if it never came to the target."""
    steps = [step for step in read_steps(store) if step.policy_version > 0]
    results = ResultsReader(store).read()
    curve = [(result["t"], result["accuracy"]) for result in results]
    return {
        "task": campaign.task,
        "loss": campaign.loss,
        "bound": campaign.bound,
        "seed": campaign.seed,
        "accuracy": curve[-1][1],
        "seconds": steps[-1].t,
        "seconds_to_target": reached(smoothed(curve), TASKS[campaign.task].target),
        "phases": phases_of(TASKS[campaign.task], steps),
        "staleness_mean": statistics.fmean(step.values["staleness_mean"] for step in steps),
        "effective_sample_size": statistics.fmean(step.values["ratio_effective_sample_size"] for step in steps),
        "length_ratio": statistics.fmean(step.values["length_ratio"] for step in steps),
        "bounds": [step.values["max_staleness"] for step in steps],
        "decisions": [[one.policy_version, one.action, one.max_staleness, one.reason] for one in read_decisions(store)],
        "curve": curve,
        "curve_over_steps": [(result["policy_version"], result["accuracy"]) for result in results],
    }


def phases_of(task: Task, steps: Sequence[Step]) -> list[Row]:
    """Seconds per step of each phase, each step counted by its effective sample size."""
    ends = [0.0, *(step.t for step in steps)]
    worth = [step.values["ratio_effective_sample_size"] for step in steps]
    return [
        {"name": name, "first": first, "seconds_per_step": (ends[last] - ends[first]) / sum(worth[first:last])}
        for name, (first, last) in zip(task.phases, itertools.pairwise(edges_of(task, len(steps))), strict=True)
    ]


def to_accuracy(rows: Sequence[Row], accuracy: float) -> float | None:
    """Seconds to an accuracy, a geometric mean over campaigns; None if one of them did not come to it."""
    times = [reached(smoothed(row["curve"]), accuracy) for row in rows]
    found = [time for time in times if time is not None]
    return statistics.geometric_mean(found) if len(found) == len(times) else None


def _add_predictions(cells: Sequence[Row], campaigns: Sequence[Campaign]) -> None:
    """Adds the planner's seconds per step to the cells of fixed bounds above 0, at which stages overlap; else None."""
    runs: dict[tuple[str, str], dict[int, Path]] = {}
    for one in campaigns:
        if one.seed == 0 and one.bound not in ("0", ADAPTIVE) and len(TASKS[one.task].phases) == 1:
            runs.setdefault((one.task, one.loss), {})[int(one.bound)] = one.run
    expected: dict[tuple[str, str, str], float] = {}
    for key, by_bound in runs.items():
        # Responses that all end together say too little for a fit.
        with suppress(InputError):
            found = predicted_seconds_per_step(by_bound, cores=None)
            expected |= {(*key, str(bound)): seconds for bound, seconds in found.items()}
    for cell in cells:
        cell["predicted_seconds_per_step"] = expected.get((cell["task"], cell["loss"], cell["bound"]))


def _print(rows: Sequence[Row], cells: Sequence[Row]) -> None:
    """`rows` are those of one task."""
    planned = {(cell["task"], cell["loss"], cell["bound"]): cell["predicted_seconds_per_step"] for cell in cells}
    table = make_table(
        f"{rows[0]['task']}: seconds to an accuracy, geometric means of the seeds",
        ["", "bound", *map(str, _ACCURACIES), "at the end", "s/step", "planned", "staleness", "ESS", "length"],
    )
    for loss, bound in dict.fromkeys((row["loss"], row["bound"]) for row in rows):
        mine = [row for row in rows if (row["loss"], row["bound"]) == (loss, bound)]
        times = [to_accuracy(mine, accuracy) for accuracy in _ACCURACIES]
        table.add_row(
            loss,
            bound,
            *("–" if time is None else f"{time:.0f}" for time in times),
            f"{statistics.median(row['accuracy'] for row in mine):.3f}",
            f"{statistics.fmean(row['seconds'] / len(row['bounds']) for row in mine):.2f}",
            "–" if (seconds := planned[rows[0]["task"], loss, bound]) is None else f"{seconds:.2f}",
            *(
                f"{statistics.fmean(row[name] for row in mine):.2f}"
                for name in ("staleness_mean", "effective_sample_size", "length_ratio")
            ),
        )
    Console(width=140).print(table)


def _print_phases(rows: Sequence[tuple[Row, Row]]) -> None:
    """`rows` are the medians of each bound, with what it loses to the best fixed bound of each phase."""
    names = [phase["name"] for phase in rows[0][0]["phases"]]
    table = make_table("Seconds per effective step, and what is lost", ["", "bound", *names, "most lost"])
    for cell, losses in rows:
        cells = [
            f"{phase['seconds_per_step']:.2f} {ratio - 1:+.0%}"
            for phase, ratio in zip(cell["phases"], losses["ratios"], strict=True)
        ]
        table.add_row(cell["loss"], cell["bound"], *cells, f"{losses['largest'] - 1:+.0%}")
    Console(width=140).print(table)


def _print_comparison(compared: Sequence[Row]) -> None:
    table = make_table("Seconds to the target, adaptive ÷ best fixed bound", ["", "", "best", "ratio", "95 %"])
    for row in compared:
        ends = "–" if row["interval"] is None else "{:.2f} to {:.2f}".format(*row["interval"])
        ratio = "–" if row["ratio"] is None or math.isnan(row["ratio"]) else f"{row['ratio']:.2f}"
        table.add_row(row["task"], row["loss"], row["best"], ratio, ends)
    Console().print(table)


if __name__ == "__main__":
    main()
