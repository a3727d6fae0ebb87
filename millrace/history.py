"""What the trainer measured at each policy version that exists, for plots over a whole run.

    ║ metrics/train-0 ║ ─► one Step a version ─► those of a future that was rolled back fall out ─► bins ─► points
    evaluations/      ──────────────────────────────────────────────────────────────────────────────────► points

Metrics are for people: a damaged part of them is passed, and `millrace fsck` names it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

from storage import layout
from storage.errors import NotInStore, PartCorrupt
from storage.schema import METRIC
from storage.store import Store
from storage.stream import Part, StreamReader

_T = TypeVar("_T")

Point = tuple[float, float]
"""(policy version, value); of several versions together, their mean one."""


@dataclass(kw_only=True)
class Step:
    """What the trainer measured when it had made one policy version."""

    policy_version: int
    incarnation: int
    t: float
    """Unix seconds."""
    values: dict[str, float]
    """By metric name."""


def read_steps(store: Store) -> list[Step]:
    """The steps of every policy version that was not rolled back, in order. Raises StreamCorrupt for a damaged record.

    Reads the whole stream: about a second for ten thousand of its parts.
    """
    steps: dict[int, Step] = {}
    incarnation = -1
    reader = StreamReader(store, layout.metrics("train", 0), METRIC)
    while (part := _next(reader)) is not None:
        for row in part.table.to_pylist():
            version = row["policy_version"]
            if row["incarnation"] > incarnation:
                incarnation = row["incarnation"]
                steps = {known: step for known, step in steps.items() if known < version}
            step = steps.setdefault(
                version, Step(policy_version=version, incarnation=incarnation, t=row["t"], values={})
            )
            step.values[row["name"]] = row["value"]
    return [steps[version] for version in sorted(steps)]


def series(
    steps: Sequence[Step], name: str, most: int, combine: Callable[[Sequence[float]], float] = fmean
) -> list[Point]:
    """The metric `name` over policy versions in at most `most` points; `combine` makes one value of several."""
    found = [step for step in steps if name in step.values]
    return [
        (fmean(step.policy_version for step in some), combine([step.values[name] for step in some]))
        for some in _bins(found, most)
    ]


def throughput(steps: Sequence[Step], most: int) -> list[Point]:
    """Response tokens trained per second over policy versions, in at most `most` points.

    Time between two incarnations of the trainer, such as a day between two nightly windows, does not count.
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


def accuracies(store: Store, most: int) -> list[Point]:
    """Held-out accuracy of every policy version that was evaluated, in at most `most` points."""
    found = []
    for path in store.list(layout.EVALUATIONS):
        try:
            result = json.loads(bytes(store.get(path)))
        except NotInStore:
            continue
        found.append((float(result["policy_version"]), float(result["accuracy"])))
    return [(fmean(version for version, _ in some), fmean(value for _, value in some)) for some in _bins(found, most)]


def _bins(items: Sequence[_T], most: int) -> list[Sequence[_T]]:
    """`items` in order, in at most `most` groups of neighbours of one size, the last one perhaps smaller."""
    size = max(1, -(-len(items) // most))
    return [items[first : first + size] for first in range(0, len(items), size)]


def _next(reader: StreamReader) -> Part | None:
    while True:
        try:
            return reader.next()
        except PartCorrupt:
            reader.next_record()
