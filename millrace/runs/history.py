"""The trainer's metrics at each surviving policy version, for plots over a whole run.

    ║ metrics/train-0 ║ ─► one Step per version ─► without rolled-back versions ─► bins ─► points
    evaluations/      ───────────────────────────────────────────────────────────► bins ─► points

Damaged parts are skipped, because metrics are only for people; `millrace fsck` lists them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

from millrace.evaluation.results import Result, measures_by_set
from millrace.rollouts.lineage import Survivors
from storage import layout
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.stream import StreamReader

_T = TypeVar("_T")

TIME_METRICS = ("time/", "total/", "usage/")
"""Prefixes of metrics about a process, not about the policy version in their row."""

Point = tuple[float, float]
"""(policy version, value); both are means if the point combines several versions."""


@dataclass(kw_only=True)
class Step:
    """The trainer's metrics after making one policy version."""

    policy_version: int
    incarnation: int
    t: float
    """Unix seconds."""
    values: dict[str, float]
    """By metric name."""


def read_steps(store: Store) -> list[Step]:
    """The steps of all surviving policy versions, in order. Raises StreamCorrupt for a damaged record.

    Reads the whole stream, which takes about a second per ten thousand parts.
    """
    steps: dict[int, Step] = {}
    survivors = Survivors()
    reader = StreamReader(store, layout.metrics("train", 0), METRIC)
    for part in reader.readable():
        for row in part.table.to_pylist():
            version, incarnation = row["policy_version"], row["incarnation"]
            if not row["name"].startswith(TIME_METRICS) and survivors.see(incarnation, version, version):
                steps = {earlier: step for earlier, step in steps.items() if earlier < version}
            step = steps.setdefault(
                version, Step(policy_version=version, incarnation=incarnation, t=row["t"], values={})
            )
            step.values[row["name"]] = row["value"]
    return [steps[version] for version in sorted(steps)]


def series(
    steps: Sequence[Step], name: str, max_points: int, combine: Callable[[Sequence[float]], float] = fmean
) -> list[Point]:
    """The metric `name` over policy versions; `combine` merges the values of one point."""
    measured = [step for step in steps if name in step.values]
    return [
        (fmean(step.policy_version for step in part), combine([step.values[name] for step in part]))
        for part in _bins(measured, max_points)
    ]


def throughput(steps: Sequence[Step], max_points: int) -> list[Point]:
    """Response tokens trained per second over policy versions.

    Time between two incarnations of the trainer, such as between two nightly windows, does not count.
    """
    pairs = [
        (step, step.t - previous.t)
        for previous, step in pairwise(steps)
        if previous.incarnation == step.incarnation and "tokens" in step.values
    ]
    points = []
    for part in _bins(pairs, max_points):
        seconds = sum(seconds for _, seconds in part)
        if seconds > 0:
            tokens = sum(step.values["tokens"] for step, _ in part)
            points.append((fmean(step.policy_version for step, _ in part), tokens / seconds))
    return points


def accuracies(results: Sequence[Result], max_points: int) -> dict[str, list[tuple[int, Result]]]:
    """The version and measures of each scored evaluation by set, the held-out prompts first.

    With more than `max_points` evaluations, only some of them.
    """
    by_set: dict[str, list[tuple[int, Result]]] = {}
    for result in results:
        for name, measures in measures_by_set(result).items():
            if measures["accuracy"] is not None:
                by_set.setdefault(name, []).append((result["policy_version"], measures))
    return {name: [part[-1] for part in _bins(points, max_points)] for name, points in by_set.items()}


def _bins(items: Sequence[_T], max_points: int) -> list[Sequence[_T]]:
    """`items` in at most `max_points` consecutive groups of equal size; the last one may be smaller."""
    size = max(1, -(-len(items) // max_points))
    return [items[first : first + size] for first in range(0, len(items), size)]
