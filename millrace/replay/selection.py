"""Which groups of a stored run to train on: a range of steps, what became of them, and a condition in SQL.

run.groups ─► outcome ─► steps ─► staleness ─► where ─► rows        nothing left? said of whom
"""

from dataclasses import dataclass

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.consumed import TRAINED
from millrace.errors import ReplayError
from millrace.replay.stored import StoredRun

_WITHOUT_FILES = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "threads": "1",
    "lock_configuration": "true",
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What part of a run."""

    from_step: int | None = None
    """The first step, named by the policy version that it made; None: the first there is."""
    to_step: int | None = None
    """The last step, included; None: the last there is."""
    where: str | None = None
    """An SQL condition over the columns of `millrace.replay.groups.GROUPS`, such as `reward_max > reward_min`."""
    dropped: bool = False
    """Also what the run dropped as stale; never what it could not read or score."""
    max_staleness: int | None = None
    """Leaves out what was staler when the run's trainer took it, policy versions; None: no bound."""


def select(run: StoredRun, selection: Selection) -> npt.NDArray[np.int64]:
    """Rows of `run.groups`, in the order of the stream, of which each can be trained on.

    Raises ReplayError where the condition can't be evaluated, where nothing is left (it says which part of the
    selection left nothing), and where what is selected was removed.
    """
    groups = run.groups
    outcomes, steps, staleness = (groups[name].to_numpy() for name in ("outcome", "step", "staleness"))
    wanted = [TRAINED, "stale"] if selection.dropped else [TRAINED]
    kept = np.isin(outcomes, wanted) & (groups["verified"].to_numpy() >= 2)
    _refuse_nothing(run, kept, f"no group that it took as {' or '.join(wanted)} has two rewards or more")
    first = run.steps[0] if selection.from_step is None else selection.from_step
    last = run.steps[-1] if selection.to_step is None else selection.to_step
    kept &= (first <= steps) & (steps <= last)
    there = f"its steps are {run.steps[0]} to {run.steps[-1]}"
    _refuse_nothing(run, kept, f"no such group is of steps {first} to {last}; {there}")
    if selection.max_staleness is not None:
        kept &= staleness <= selection.max_staleness
        _refuse_nothing(run, kept, f"no such group has a staleness of at most {selection.max_staleness}")
    if selection.where is not None:
        fitting = np.zeros(groups.num_rows, dtype=bool)
        fitting[_matching(groups, selection.where)] = True
        kept &= fitting
        _refuse_nothing(run, kept, f"no such group fulfils {selection.where!r}")
    rows = np.flatnonzero(kept)
    run.check_stored(rows)
    return rows


def _refuse_nothing(run: StoredRun, kept: npt.NDArray[np.bool_], sentence: str) -> None:
    if not kept.any():
        raise ReplayError(f"{run.url}: {sentence}")


def _matching(groups: pa.Table, where: str) -> npt.NDArray[np.int64]:
    """Rows that fulfil an SQL condition, which reaches no file and no other table."""
    numbered = groups.append_column("row", pa.array(np.arange(groups.num_rows)))
    try:
        with duckdb.connect(config=_WITHOUT_FILES) as database:
            # As an expression: it can't end the statement and begin another.
            rows: npt.NDArray[np.int64] = database.from_arrow(numbered).filter(where).project("row").fetchnumpy()["row"]
    except duckdb.Error as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())
        columns = ", ".join(groups.column_names)
        raise ReplayError(f"where: {where!r}: {reason}; expected an SQL condition over {columns}") from error
    return rows
