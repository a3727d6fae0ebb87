"""Which of the simulated candidates wins, which are worth showing beside it, and why they lost."""

from collections.abc import Sequence
from dataclasses import replace

from millrace.planning.search.entry import Entry, Goal
from millrace.planning.search.verdicts import ALIKE, compared

_SPLITS = 3
"""Other splits that are shown."""
_STALER = 0.05
"""Versions by which staleness must differ to be mentioned."""


def choose(entries: Sequence[Entry], goal: Goal) -> Entry:
    """The best by `goal`; of those that are as good, the one with the least staleness, GPUs, bound and places."""
    best = max(entry.score(goal) for entry in entries)
    return min((entry for entry in entries if entry.score(goal) >= (1 - ALIKE) * best), key=_freshness)


def others_of(entries: Sequence[Entry], winner: Entry) -> list[Entry]:
    """Of `entries`, best first: the best few of other splits, the best whose stages wait for each other, on GPUs of
    their own and by turns, the best of each other batch, and the winner's layout with a lower bound."""
    seen = {_kind(winner, winner)}
    splits: list[Entry] = []
    kinds: list[Entry] = []
    for entry in entries:
        kind = _kind(entry, winner)
        if kind not in seen:
            seen.add(kind)
            (splits if kind[0] == "split" else kinds).append(entry)
    layout, bound = winner.candidate.layout, winner.candidate.config.effective_max_staleness
    lower = [
        entry
        for entry in entries
        if entry.candidate.layout == layout and entry.candidate.config.effective_max_staleness < bound
    ]
    return [*splits[:_SPLITS], *kinds, *lower[:1]]


def lost(entry: Entry, winner: Entry, goal: Goal) -> Entry:
    """The entry with the reason. Both are simulated."""
    assert entry.outcome is not None
    assert winner.outcome is not None
    batch, other = (one.candidate.config.training.groups_per_step for one in (winner, entry))
    if batch == other:
        said = [compared(entry.outcome.step_seconds, winner.outcome.step_seconds)]
    else:
        ratio = winner.score("fastest") / entry.score("fastest")
        said = [f"{other} groups per step: {ratio:.2f} × the time per token"]
    if goal == "cheapest" and entry.gpus and winner.gpus:
        said.append(f"{winner.score(goal) / entry.score(goal):.2f} × the GPU-hours per token")
    if entry.score(goal) >= (1 - ALIKE) * winner.score(goal):
        if entry.outcome.staleness_mean > winner.outcome.staleness_mean + _STALER:
            said.append(f"staler: {entry.outcome.staleness_mean:.2f}, not {winner.outcome.staleness_mean:.2f}")
        elif (entry.gpus or 0) > (winner.gpus or 0):
            said.append(f"takes {entry.gpus} GPUs, not {winner.gpus}")
    return replace(entry, reason="; ".join([*said, entry.bottleneck or ""]))


def _freshness(entry: Entry) -> tuple[float, ...]:
    """Lower is better."""
    assert entry.outcome is not None
    config, staleness = entry.candidate.config, round(entry.outcome.staleness_mean, 1)
    places = config.generation.replicas * config.generation.groups_per_batch
    return staleness, entry.gpus or 0, config.effective_max_staleness, places


def _kind(entry: Entry, winner: Entry) -> tuple[object, ...]:
    """What is shown once: a batch, a way to wait, a split into trainer's GPUs and generators of a size, or replicas."""
    candidate, config = entry.candidate, entry.candidate.config
    if config.training.groups_per_step != winner.candidate.config.training.groups_per_step:
        return "batch", config.training.groups_per_step
    if config.pipeline.mode == "sync":
        return "sync", config.placement.colocated
    if entry.gpus is None:
        return "split", config.generation.replicas
    return "split", candidate.trainer_gpus, candidate.generator_tensor
