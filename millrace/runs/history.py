"""The trainer's metrics at each surviving policy version.

    ║ metrics/train-0 ║ ─► one Step per version ─► without rolled-back versions

Damaged parts are skipped, because metrics are only for people; `millrace fsck` lists them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow.compute as pc

from millrace.rollouts.lineage import Survivors, part_of_step
from storage import layout
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.merged import MergedReader, before
from storage.streams.stream import StreamReader

TIME_METRICS = ("time/", "total/", "usage/")
"""Prefixes of metrics about a process, not about the policy version in their row."""


@dataclass(kw_only=True)
class Step:
    """The trainer's metrics after making one policy version."""

    policy_version: int
    incarnation: int
    t: float
    """Unix seconds."""
    values: dict[str, float]
    """By metric name."""


def read_metrics(store: Store, stage: str, replica: int) -> MergedReader:
    """A reader of all metrics of a stage replica."""
    return MergedReader(store, layout.metrics(stage, replica), layout.merged_metrics(stage, replica), METRIC)


def read_step(store: Store, step: int, incarnation: int) -> dict[str, float]:
    """The trainer's metrics at the version that this incarnation made, by name. Raises StreamCorrupt."""
    path = layout.metrics("train", 0)
    first = part_of_step(store, path, step, incarnation)
    values: dict[str, float] = {}
    for part in StreamReader(store, path, METRIC, before(first)).readable() if first else ():
        if part.record.incarnation > incarnation or part.record.min_policy_version > step:
            break
        rows = part.table.filter(pc.equal(part.table["policy_version"], step))
        values |= zip(rows["name"].to_pylist(), rows["value"].to_pylist(), strict=True)
    return values


def read_steps(store: Store) -> list[Step]:
    """The steps of all surviving policy versions, in order. Raises StreamCorrupt for a damaged record.

    Reads the whole stream.
    """
    steps: dict[int, Step] = {}
    survivors = Survivors()
    for part in read_metrics(store, "train", 0).readable():
        for row in part.table.to_pylist():
            version, incarnation = row["policy_version"], row["incarnation"]
            if not row["name"].startswith(TIME_METRICS) and survivors.see(incarnation, version, version):
                steps = {earlier: step for earlier, step in steps.items() if earlier < version}
            step = steps.setdefault(
                version, Step(policy_version=version, incarnation=incarnation, t=row["t"], values={})
            )
            step.values[row["name"]] = row["value"]
    return [steps[version] for version in sorted(steps)]


def tokens_per_second(steps: Sequence[Step]) -> float | None:
    """Response tokens trained per second; None with fewer than two steps.

    Time between two incarnations of the trainer, such as between two nightly windows, does not count.
    """
    pairs = [
        (step.values["tokens"], step.t - previous.t)
        for previous, step in pairwise(steps)
        if previous.incarnation == step.incarnation and "tokens" in step.values
    ]
    seconds = sum(seconds for _, seconds in pairs)
    return sum(tokens for tokens, _ in pairs) / seconds if seconds > 0 else None
