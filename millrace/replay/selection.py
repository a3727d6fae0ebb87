"""Which groups of stored runs a replay trains on, and in which batches.

    run.groups ─► outcome ─► steps ─► staleness ─► where ─► rows     if nothing is left, the error names the filter

    source 0   a0 a1 a2 a3 a4 ─┐  stored: one source after the other
                               ├─► a0 a1 a2 │ a3 a4 b0 │ b1 b2 …   batches of groups_per_step
    source 1   b0 b1 b2 …     ─┘  shuffled: all of them in a new order

With one source, stored order, whole steps and the run's own groups_per_step, these are the original batches.
"""

from collections.abc import Iterator, Sequence

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.requests import ReplayRequest, Selection
from millrace.errors import ReplayError
from millrace.replay.source_run import SourceRun
from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.shaping import ZERO_ADVANTAGE
from millrace.runs.provenance import read_start_hashes

_READABLE = ("stale", ZERO_ADVANTAGE, "truncated")
"""Reasons to drop a group that could have been trained."""
_WITHOUT_FILES = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "threads": "1",
    "lock_configuration": "true",
}


def select(run: SourceRun, selection: Selection) -> npt.NDArray[np.int64]:
    """Rows of `run.groups` that can be trained on, in the order of the stream.

    Raises ReplayError if the condition can't be evaluated, if nothing is left (it names the filter that left nothing),
    and if what is selected was removed.
    """
    kept = np.ones(run.groups.num_rows, dtype=bool)
    for fitting, sentence in _filters(run, selection):
        kept &= fitting
        if not kept.any():
            raise ReplayError(f"{run.url}: {sentence}")
    rows = np.flatnonzero(kept)
    run.check_stored(rows)
    return rows


def _filters(run: SourceRun, selection: Selection) -> Iterator[tuple[npt.NDArray[np.bool_], str]]:
    """Which rows each filter keeps, and the sentence if none is left."""
    outcomes, verified, steps, staleness = (
        run.groups[name].to_numpy() for name in ("outcome", "verified", "step", "staleness")
    )
    wanted = [TRAINED, *_READABLE] if selection.dropped else [TRAINED]
    sentence = f"no group that it took as {' or '.join(wanted)} has two rewards or more"
    yield np.isin(outcomes, wanted) & (verified >= 2), sentence
    first = run.steps[0] if selection.from_step is None else selection.from_step
    last = run.steps[-1] if selection.to_step is None else selection.to_step
    sentence = f"no such group is of steps {first} to {last}; its steps are {run.steps[0]} to {run.steps[-1]}"
    yield (first <= steps) & (steps <= last), sentence
    if selection.max_staleness is not None:
        sentence = f"no such group has a staleness of at most {selection.max_staleness}"
        yield staleness <= selection.max_staleness, sentence
    if selection.where is not None:
        matching = _matching(run.groups, selection.where)
        yield np.isin(np.arange(len(steps)), matching), f"no such group fulfils {selection.where!r}"


def _matching(groups: pa.Table, where: str) -> npt.NDArray[np.int64]:
    """Rows that fulfil an SQL condition, which can't read files or other tables."""
    numbered = groups.append_column("row", pa.array(np.arange(groups.num_rows)))
    try:
        with duckdb.connect(config=_WITHOUT_FILES) as database:
            # As an expression it can't end the statement and begin another.
            rows: npt.NDArray[np.int64] = database.from_arrow(numbered).filter(where).project("row").fetchnumpy()["row"]
    except duckdb.Error as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())
        columns = ", ".join(groups.column_names)
        raise ReplayError(f"where: {where!r}: {reason}; expected an SQL condition over {columns}") from error
    return rows


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
