"""In which batches the groups of one or several stored runs are trained.

    source 0   a0 a1 a2 a3 a4 ─┐  stored: one source after the other
                               ├─► a0 a1 a2 │ a3 a4 b0 │ b1 b2 …   batches of groups_per_step
    source 1   b0 b1 b2 …     ─┘  shuffled: all of them in a new order

With one source, stored order, whole steps and the run's own groups_per_step, these are the original batches.
"""

from collections.abc import Sequence

import numpy as np

from configs.replay import ReplayRequest
from millrace.errors import ReplayError
from millrace.replay.sources.selection import select
from millrace.replay.sources.source_run import SourceRun
from millrace.runs.start_hashes import read_start_hashes

Batch = list[tuple[int, int]]
"""(index of the source, row of its `groups`) of each group that a step trains, in order."""


def plan(sources: Sequence[SourceRun], request: ReplayRequest, *, groups_per_step: int, seed: int) -> list[Batch]:
    """Whole batches of `groups_per_step` groups: at least one, and the same ones whenever it is called.

    `seed` decides the shuffled order. Groups that do not fill a last batch are left out. Raises ReplayError if there is
    no whole batch, and as `select` does.
    """
    groups = [(index, row) for index, run in enumerate(sources) for row in select(run, request).tolist()]
    if request.order == "shuffled":
        groups = [groups[place] for place in np.random.default_rng(seed).permutation(len(groups)).tolist()]
    whole = len(groups) - len(groups) % groups_per_step
    if not whole:
        raise ReplayError(
            f"{len(groups)} stored groups are chosen and training.groups_per_step is {groups_per_step}; "
            "expected at least one whole batch"
        )
    return [groups[first : first + groups_per_step] for first in range(0, whole, groups_per_step)]


def check_same_tokens(sources: Sequence[SourceRun]) -> None:
    """Raises ReplayError unless all sources have one vocabulary and tokenizer, without which they can't be mixed."""
    first, *others = sources
    for other in others:
        if other.vocab_size != first.vocab_size:
            raise ReplayError(
                f"{other.url}: its vocabulary has {other.vocab_size} tokens, but that of {first.url} has "
                f"{first.vocab_size}; expected one vocabulary"
            )
        if _tokenizer(other) != _tokenizer(first):
            raise ReplayError(f"{other.url}: its tokenizer differs from that of {first.url}; expected the same one")


def _tokenizer(run: SourceRun) -> str | None:
    """The hash of its file, or else the folder that the run was started from."""
    path: str | None = run.config["model"]["path"]
    return (read_start_hashes(run.store) or {}).get("tokenizer.json", path)
