"""What a run's trainer took, group by group: trajectories from where they lie, and the rewards that it was given then.

    rows of groups ─► ║ trajectories ║ of the run itself, or of the run that this replay went through ─┬─► Taken
                      ║ consumed ║ ─► rewards ─────────────────────────────────────────────────────────┘

Stored scores may have changed since; what the trainer took has not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millrace.errors import ReplayError
from millrace.replay.spec import read_spec
from millrace.replay.stored import StoredRun
from millrace.scored import ScoredGroup
from millrace.trajectories import prompt_of
from millrace.types import Prompt
from storage import layout
from storage.factory import open_store
from storage.schema import TRAJECTORY
from storage.stream import read_part


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One group that was trained on."""

    group: ScoredGroup
    rewards: list[float | None]
    """[G] as the trainer was given them; None where the verifier had failed."""

    @property
    def trained(self) -> list[int]:
        """Members that the step used."""
        return [member for member, reward in enumerate(self.rewards) if reward is not None]


def taken(run: StoredRun, rows: Sequence[int]) -> Iterator[Taken]:
    """These rows of `run.groups`, in this order.

    Raises ReplayError where their trajectories are gone or can't be told apart, and what `StoredRun.read` raises.
    """
    for row, group in zip(rows, _groups(run, rows), strict=True):
        yield Taken(group=group, rewards=run.rewards(row))


def prompts(run: StoredRun, rows: Sequence[int]) -> list[Prompt]:
    """The prompts of these rows of `run.groups`. Raises what `taken` raises."""
    home = _home(run)
    generators, first_rows = (run.groups[name].to_numpy()[list(rows)] for name in ("generator", "first_row_id"))
    tables: dict[tuple[int, int], pa.Table] = {}
    found = []
    for generator, first_row in zip(generators.tolist(), first_rows.tolist(), strict=True):
        part = int(home.parts.parts_of(generator, np.array([first_row]))[0])
        record = home.parts.records[generator][part]
        if (generator, part) not in tables:
            path = layout.trajectories(generator)
            tables[generator, part] = read_part(home.store, path, TRAJECTORY, record, ["prompt_id", "meta"])
        row = tables[generator, part].slice(first_row - record.first_row_id, 1).to_pylist()[0]
        found.append(prompt_of(row["prompt_id"], row["meta"]))
    return found


def _groups(run: StoredRun, rows: Sequence[int]) -> Iterator[ScoredGroup]:
    home = _home(run)
    if home is run:
        run.check_stored(np.array(rows, dtype=np.int64))
        yield from run.read(rows)
        return
    generators, first_rows = (run.groups[name].to_numpy() for name in ("generator", "first_row_id"))
    for row in rows:
        yield home.parts.group(int(generators[row]), int(first_rows[row]))


def _home(run: StoredRun) -> StoredRun:
    """The run in whose store its trajectories lie."""
    spec = read_spec(run.store)
    if spec is None:
        return run
    if len(spec.sources) > 1:
        raise ReplayError(
            f"{run.url}: a replay of {len(spec.sources)} stored runs, which does not say which of them each of its "
            "trajectories is from; expected a run, or a replay of one"
        )
    return StoredRun(open_store(spec.sources[0].url))
