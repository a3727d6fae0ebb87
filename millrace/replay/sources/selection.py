"""Which groups of a stored run to train on: a range of steps, what became of them, and an SQL condition.

run.groups ─► outcome ─► steps ─► staleness ─► where ─► rows        if nothing is left, the error names the filter
"""

from collections.abc import Iterator

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.replay import Selection
from millrace.errors import ReplayError
from millrace.replay.sources.source_run import SourceRun
from millrace.rollouts.consumed import TRAINED
from millrace.selection.spread import ZERO_ADVANTAGE

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
