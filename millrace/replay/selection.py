"""Selects the groups of stored runs that a replay trains on, and cuts them into batches.

    run.groups ─► outcome ─► steps ─► staleness ─► where ─► rows     if nothing is left, the error names the filter

    source 0   a0 a1 a2 a3 a4 ─┐  stored: one source after the other
                               ├─► a0 a1 a2 │ a3 a4 b0 │ b1 b2 …   batches of groups_per_step
    source 1   b0 b1 b2 …     ─┘  shuffled: all of them in a new order

With one source, stored order, whole steps and the run's own groups_per_step, these are the original batches.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.requests import ReplayRequest, Selection
from millrace.errors import InputError, ReplayError
from millrace.prompts.stored import rows_where
from millrace.replay.source_run import SourceRun
from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.shaping import ZERO_ADVANTAGE
from millrace.runs.provenance import read_start_hashes


def select(run: SourceRun, selection: Selection) -> npt.NDArray[np.int64]:
    """Rows of `run.groups` that can be trained on, in the order of the stream.

    Raises ReplayError if a condition can't be evaluated, if one leaves nothing, and if a selected group was removed.
    """
    outcomes = (TRAINED, "stale", ZERO_ADVANTAGE, "truncated") if selection.dropped else (TRAINED,)
    first = run.steps[0] if selection.from_step is None else selection.from_step
    last = run.steps[-1] if selection.to_step is None else selection.to_step
    conditions = [
        " or ".join(f"outcome = '{outcome}'" for outcome in outcomes),
        "verified >= least(2, rollouts)",
        f"step >= {first} and step <= {last}",
    ]
    if selection.max_staleness is not None:
        conditions.append(f"staleness <= {selection.max_staleness}")
    if selection.where is not None:
        conditions.append(selection.where)
    groups = run.groups.append_column("row", pa.array(np.arange(run.groups.num_rows)))
    for condition in conditions:
        try:
            groups = rows_where(groups, condition)
        except InputError as error:
            expected = f"an SQL condition over {', '.join(groups.column_names[:-1])}"
            raise ReplayError(error.read, file="--where", expected=expected) from error
        if groups.num_rows == 0:
            steps = f"the run has steps {run.steps[0]} to {run.steps[-1]}"
            raise ReplayError(f"no group is left; {steps}", file=run.url, expected=f"a group with {condition}")
    rows: npt.NDArray[np.int64] = np.sort(groups["row"].to_numpy())
    run.check_stored(rows)
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
            f"{len(groups)} stored groups are selected and training.groups_per_step is {groups_per_step}",
            expected="at least one whole batch",
        )
    return [groups[first : first + groups_per_step] for first in range(0, whole, groups_per_step)]


def check_same_tokens(sources: Sequence[SourceRun]) -> None:
    """Raises ReplayError unless all sources have one vocabulary and tokenizer, without which they can't be mixed."""
    first = sources[0]
    for source in sources[1:]:
        if (source.vocab_size, _tokenizer(source)) != (first.vocab_size, _tokenizer(first)):
            raise ReplayError(
                "its vocabulary or its tokenizer differs", file=source.url, expected=f"those of {first.url}"
            )


def _tokenizer(run: SourceRun) -> str | None:
    """The hash of its file, or else the folder that the run was started from."""
    path: str | None = run.config["model"]["path"]
    return (read_start_hashes(run.store) or {}).get("tokenizer.json", path)
