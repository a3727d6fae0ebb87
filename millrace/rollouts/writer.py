"""A generator's side of its stream: finished trajectories become rows, and rows become parts of whole groups."""

from collections.abc import Mapping, Sequence
from types import TracebackType

from configs.operation import StorageConfig
from millrace.rollouts.arrow import trajectory_table
from millrace.rollouts.group_sequence import GroupSet, committed_groups
from millrace.rollouts.lineage import Lineage
from millrace.types import Sampling, Trajectory
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.base import Store
from storage.streams.group_commit import GroupCommit
from storage.streams.stream import StreamWriter

_MOST_ROWS = 4096
_MOST_BYTES = 64 << 20
"""Finished trajectories that are committed at once, and the bytes of their Arrow data."""


class TrajectoryWriter:
    """Writes one generator's trajectories. It fences off every earlier writer of the stream."""

    def __init__(
        self,
        store: Store,
        generator: int,
        sampling: Mapping[str, Sampling],
        storage: StorageConfig,
        *,
        vocab_size: int,
        group_size: int,
        num_generators: int,
    ) -> None:
        """`sampling` is by source. `group_size` is that of every group, or 0 where sources differ in it."""
        self._store = store
        self._generator = generator
        self._num_generators = num_generators
        self.sampling = sampling
        self._stream = StreamWriter(
            store,
            layout.trajectories(generator),
            TRAJECTORY,
            writer=f"generate-{generator}",
            vocab_size=vocab_size,
            group_size=group_size,
        )
        self.epoch = self._stream.epoch
        self._commits = GroupCommit(
            self._stream,
            max_rows=_MOST_ROWS,
            max_bytes=_MOST_BYTES,
            max_seconds=storage.commit_max_ms / 1000,
        )
        # Known once the first weights are here; with the newest policy version in the parts of their incarnation.
        self._incarnation = -1
        self._newest = 0
        self.groups = GroupSet.empty(generator, num_generators)
        """The groups committed and pending whose weights exist."""

    @property
    def rows(self) -> int:
        """Trajectories committed and pending."""
        return self._commits.rows

    def restart(self, lineage: Lineage) -> None:
        """Commits the pending rows, then continues under weights of this lineage, after the groups that it holds."""
        self.flush()
        self._incarnation = lineage.incarnation
        # Never below the version that this incarnation began with, for the reason given in `append`.
        self._newest = max(lineage.until.values(), default=0)
        self.groups = committed_groups(self._store, self._generator, self._num_generators, lineage)

    def append(self, trajectories: Sequence[Trajectory]) -> int:
        """Adds whole groups. Returns the number of their response tokens."""
        table = trajectory_table(
            trajectories,
            first_row_id=self.rows,
            sampling=self.sampling,
            incarnation=self._incarnation,
            generator=self._generator,
            epoch=self.epoch,
        )
        versions = [version for trajectory in trajectories for version, _ in trajectory.response.version_spans]
        # After a rollback parts are accepted or refused by this number. It must never fall: otherwise a part would be
        # accepted whose predecessor is refused, and its record would count groups that are generated once more.
        self._newest = max(self._newest, *versions)
        group_ids = list(dict.fromkeys(trajectory.request.group_id for trajectory in trajectories))
        for group_id in group_ids:
            self.groups.add(group_id)
        num_tokens = sum(len(trajectory.response.tokens) for trajectory in trajectories)
        self._commits.append(
            table,
            tokens=num_tokens,
            min_policy_version=min(versions),
            max_policy_version=self._newest,
            incarnation=self._incarnation,
            group_ids=group_ids,
            last_group_id=self.groups.last,
            missing_groups=sorted(self.groups.missing),
        )
        return num_tokens

    def flush(self) -> None:
        """Commits the pending rows; they are durable on return."""
        self._commits.flush()

    def __enter__(self) -> "TrajectoryWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Commits the pending rows, unless an error interrupted the caller.
        self._commits.__exit__(kind, error, trace)
