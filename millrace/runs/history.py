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
                steps = {known: step for known, step in steps.items() if known < version}
            step = steps.setdefault(
                version, Step(policy_version=version, incarnation=incarnation, t=row["t"], values={})
            )
            step.values[row["name"]] = row["value"]
    return [steps[version] for version in sorted(steps)]


def series(
    steps: Sequence[Step], name: str, most: int, combine: Callable[[Sequence[float]], float] = fmean
) -> list[Point]:
    """The metric `name` over policy versions in at most `most` points; `combine` merges the values of one point."""
    found = [step for step in steps if name in step.values]
    return [
        (fmean(step.policy_version for step in some), combine([step.values[name] for step in some]))
        for some in _bins(found, most)
    ]


def throughput(steps: Sequence[Step], most: int) -> list[Point]:
    """Response tokens trained per second over policy versions, in at most `most` points.

    Time between two incarnations of the trainer, such as between two nightly windows, does not count.
    """
    pairs = [
        (step, step.t - before.t)
        for before, step in pairwise(steps)
        if before.incarnation == step.incarnation and "tokens" in step.values
    ]
    points = []
    for some in _bins(pairs, most):
        seconds = sum(seconds for _, seconds in some)
        if seconds > 0:
            tokens = sum(step.values["tokens"] for step, _ in some)
            points.append((fmean(step.policy_version for step, _ in some), tokens / seconds))
    return points


@dataclass(frozen=True, kw_only=True)
class AccuracyPoint:
    """The accuracy on an evaluation set; means if the point combines several versions."""

    version: float
    value: float
    interval: tuple[float, float] | None
    """Its 95 % confidence interval; None if none is known."""


def accuracies(results: Sequence[Result], most: int) -> dict[str, list[AccuracyPoint]]:
    """The accuracy on each evaluation set, the held-out prompts first, in at most `most` points per set."""
    by_set: dict[str, list[tuple[int, Result]]] = {}
    for result in results:
        for name, measures in measures_by_set(result).items():
            if measures["accuracy"] is not None:
                by_set.setdefault(name, []).append((result["policy_version"], measures))
    return {name: [_accuracy_point(some) for some in _bins(found, most)] for name, found in by_set.items()}


def _accuracy_point(some: Sequence[tuple[int, Result]]) -> AccuracyPoint:
    ends: list[Sequence[float]] = [measures.get("accuracy_interval") or () for _, measures in some]
    # Rewards of a single prompt have an interval without ends.
    known = all(len(one) == 2 and None not in one for one in ends)
    return AccuracyPoint(
        version=fmean(version for version, _ in some),
        value=fmean(measures["accuracy"] for _, measures in some),
        interval=(fmean(one[0] for one in ends), fmean(one[1] for one in ends)) if known else None,
    )


def _bins(items: Sequence[_T], most: int) -> list[Sequence[_T]]:
    """`items` in at most `most` consecutive groups of equal size; the last one may be smaller."""
    size = max(1, -(-len(items) // most))
    return [items[first : first + size] for first in range(0, len(items), size)]
