"""The chart of a plan: seconds per step over the split of the GPUs."""

from flows.display.plots import line_chart
from millrace.planning.candidate import Candidate
from millrace.planning.plan import Plan
from millrace.runs.history import Point

X = "GPUs of the trainer"


def chart(plan: Plan) -> str | None:
    """As one line of Markdown; None if there is no split to show."""
    lines = splits(plan)
    if not lines:
        return None
    winner = plan.chosen
    assert winner.outcome is not None
    mark = "winner", (float(winner.trainer_gpus), winner.outcome.step_seconds)
    return line_chart("Seconds per step by split", lines, x_name=X, mark=mark)


def splits(plan: Plan) -> dict[str, list[Point]]:
    """Size of a generator → (GPUs of the trainer, seconds per step) of the fastest config simulated with that split.

    Only asynchronous ones of the winner's batch: others' steps are not alike. Empty if GPUs are not divided, or all in
    one way.
    """
    if plan.is_what_if or plan.gpus is None:
        return {}
    best: dict[str, dict[int, float]] = {}
    for entry in plan.simulated:
        if entry.outcome is not None and _is_alike(entry, plan.chosen):
            line = best.setdefault(f"TP {entry.generator_tensor}", {})
            gpus = entry.trainer_gpus
            line[gpus] = min(entry.outcome.step_seconds, line.get(gpus, entry.outcome.step_seconds))
    found = {name: sorted((float(x), y) for x, y in points.items()) for name, points in sorted(best.items(), key=_size)}
    return found if len({x for points in found.values() for x, _ in points}) > 1 else {}


def _is_alike(entry: Candidate, winner: Candidate) -> bool:
    one, other = entry.config, winner.config
    same_batch = one.training.groups_per_step == other.training.groups_per_step
    return one.pipeline.mode == other.pipeline.mode and same_batch


def _size(line: tuple[str, dict[int, float]]) -> int:
    return int(line[0].removeprefix("TP "))
