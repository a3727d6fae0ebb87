"""The groups that a run's trainer consumed: stored trajectories, with the rewards that the trainer saw.

    rows of groups ─► ║ trajectories ║ of the run itself, or of the source of this replay ─┬─► TrainedGroup
                      ║ consumed ║ ─► rewards ─────────────────────────────────────────────┘

Stored scores may have changed since; the rewards in `consumed` have not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millrace.errors import ReplayError
from millrace.replay.results import read_spec
from millrace.replay.source_run import SourceRun
from millrace.rollouts.arrow import prompt_of
from millrace.rollouts.scored_group import ScoredGroup
from millrace.types import Prompt
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.factory import open_store
from storage.streams.stream import read_part


@dataclass(frozen=True, kw_only=True)
class TrainedGroup:
    """One group that was trained on."""

    group: ScoredGroup
    rewards: list[float | None]
    """[G] as the trainer saw them; None where the verifier had failed."""

    trained: list[int]
    """Members that the step used."""


def trained_groups(run: SourceRun, rows: Sequence[int]) -> Iterator[TrainedGroup]:
    """These rows of `run.groups`, in this order.

    Raises ReplayError if their trajectories are gone or can't be told apart, and what `SourceRun.read` raises.
    """
    source = _trajectory_source(run)
    if source is run:
        run.check_stored(np.array(rows, dtype=np.int64))
        groups = run.read(rows)
    else:
        generators, first_rows = (run.groups[name].to_numpy() for name in ("generator", "first_row_id"))
        stored = ((row, source.parts.group(int(generators[row]), int(first_rows[row]))) for row in rows)
        groups = (run.masked(row, group) for row, group in stored)
    for row, group in zip(rows, groups, strict=True):
        yield TrainedGroup(group=group, rewards=run.rewards(row), trained=run.trained(row))


def prompts(run: SourceRun, rows: Sequence[int]) -> list[Prompt]:
    """The prompts of these rows of `run.groups`. Raises as `trained_groups` does."""
    source = _trajectory_source(run)
    generators, first_rows = (run.groups[name].to_numpy()[list(rows)] for name in ("generator", "first_row_id"))
    tables: dict[tuple[int, int], pa.Table] = {}
    found = []
    for generator, first_row in zip(generators.tolist(), first_rows.tolist(), strict=True):
        part = int(source.parts.parts_of(generator, np.array([first_row]))[0])
        record = source.parts.records[generator][part]
        if (generator, part) not in tables:
            path = layout.trajectories(generator)
            tables[generator, part] = read_part(source.store, path, TRAJECTORY, record, ["prompt_id", "meta"])
        row = tables[generator, part].slice(first_row - record.first_row_id, 1).to_pylist()[0]
        found.append(prompt_of(row["prompt_id"], row["meta"]))
    return found


def _trajectory_source(run: SourceRun) -> SourceRun:
    """The run that stores its trajectories."""
    spec = read_spec(run.store)
    if spec is None:
        return run
    if len(spec.sources) > 1:
        raise ReplayError(
            f"{run.url}: a replay of {len(spec.sources)} stored runs, which does not record the source of each of its "
            "trajectories; expected a run, or a replay of one"
        )
    return SourceRun(open_store(spec.sources[0]))
