"""Figures of a run that its status, its pages and its plan share: staleness and bottleneck."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from millrace.rollouts.ledger import Account

_BUSY = 0.1
"""A stage that is idle for less of the time is the bottleneck."""
_PUSH_SHARE = 0.5
"""Weights that travel for more of a step are the bottleneck if no stage is."""
_BOUND = {"train": "trainer-bound", "generate": "generator-bound", "score": "scorer-bound"}


def staleness_trained(account: Account) -> dict[str, Any]:
    """Staleness of the trained trajectories, policy versions: histogram, mean and maximum."""
    histogram = account.staleness
    total = histogram.total()
    return {
        "histogram": {str(staleness): count for staleness, count in sorted(histogram.items())},
        "mean": sum(staleness * count for staleness, count in histogram.items()) / total if total else None,
        "max": max(histogram, default=None),
    }


class Bottleneck(NamedTuple):
    stage: str | None
    """`train`, `generate`, `score` or `sync_weights`; None if stages wait for each other."""
    sentence: str
    """With idle shares: "trainer-bound: train 99% busy, generate idle 44%"."""


def find_bottleneck(
    idle: Mapping[str, float], *, sync: bool, step_seconds: float | None = None, push: float = 0.0
) -> Bottleneck:
    """The bottleneck of stages that are `idle` for these shares of the time; a stage that is missing counts as idle.

    `push`: seconds that a version travels to the generators.
    """
    stage = min(_BOUND, key=lambda name: idle.get(name, 1.0))
    shares = {name: f"{name} idle {idle.get(name, 1.0):.0%}" for name in ("train", "generate")}
    if idle.get(stage, 1.0) <= _BUSY:
        idle_shares = ", ".join(share for name, share in shares.items() if name != stage)
        return Bottleneck(stage, f"{_BOUND[stage]}: {stage} {1 - idle[stage]:.0%} busy, {idle_shares}")
    both = ", ".join(shares.values())
    travelling = f"a version takes {push:.3g} s to the generators"
    if sync:
        return Bottleneck(None, f"stages wait for each other: {both}{f'; {travelling}' if push else ''}")
    if step_seconds is not None and push > _PUSH_SHARE * step_seconds:
        return Bottleneck("sync_weights", f"bound by weight sync: {travelling}; {both}")
    waits = "generators wait for the staleness bound or for long responses"
    return Bottleneck(None, f"no stage is always busy: {both}; {waits}")
