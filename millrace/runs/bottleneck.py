"""What holds a pipeline up, in words: the same ones for a simulated campaign and for a measured run."""

from collections.abc import Mapping
from typing import NamedTuple

_BUSY = 0.1
"""A stage that is idle for less of the time is the bottleneck."""
_PUSH_SHARE = 0.5
"""Weights that travel for more of a step hold the pipeline up if no stage does."""
_NAMES = {"train": "trainer-bound", "generate": "generator-bound", "score": "scorer-bound"}


class Bottleneck(NamedTuple):
    """What holds a pipeline up."""

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
    stage = min(_NAMES, key=lambda name: idle.get(name, 1.0))
    shares = {name: f"{name} idle {idle.get(name, 1.0):.0%}" for name in ("train", "generate")}
    if idle.get(stage, 1.0) <= _BUSY:
        others = ", ".join(said for name, said in shares.items() if name != stage)
        return Bottleneck(stage, f"{_NAMES[stage]}: {stage} {1 - idle[stage]:.0%} busy, {others}")
    both = ", ".join(shares.values())
    travelling = f"a version takes {push:.3g} s to the generators" if push else ""
    if sync:
        return Bottleneck(None, f"stages wait for each other: {both}{f'; {travelling}' if travelling else ''}")
    if step_seconds is not None and push > _PUSH_SHARE * step_seconds:
        return Bottleneck("sync_weights", f"bound by weight sync: {travelling}; {both}")
    waits = "generators wait for the staleness bound or for long responses"
    return Bottleneck(None, f"no stage is always busy: {both}; {waits}")
