"""A generator's side of its stream: finished trajectories become rows, and rows become parts of whole groups."""

from collections.abc import Sequence
from types import TracebackType

from configs.schema import StorageConfig
from millrace.rollouts.arrow import trajectory_table
from millrace.types import Sampling, Trajectory
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.base import Store
from storage.streams.group_commit import GroupCommit
from storage.streams.stream import StreamWriter


class TrajectoryWriter:
    """Writes one generator's trajectories. It fences off every earlier writer of the stream."""

    def __init__(
        self,
        store: Store,
        generator: int,
        sampling: Sampling,
        storage: StorageConfig,
        *,
        vocab_size: int,
        group_size: int,
    ) -> None:
        self._generator = generator
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
            max_rows=storage.commit_max_rows,
            max_bytes=storage.commit_max_bytes,
            max_seconds=storage.commit_max_ms / 1000,
        )
        # The trainer's incarnation of the last rows, and the newest policy version in its parts.
        self._incarnation: int | None = None
        self._newest = 0

    @property
    def rows(self) -> int:
        """Trajectories committed and pending."""
        return self._commits.rows

    def append(self, trajectories: Sequence[Trajectory], incarnation: int) -> int:
        """Adds whole groups in order, sampled under one incarnation. Returns the number of their response tokens."""
        table = trajectory_table(
            trajectories,
            first_row_id=self.rows,
            sampling=self.sampling,
            incarnation=incarnation,
            generator=self._generator,
            epoch=self.epoch,
        )
        versions = [version for trajectory in trajectories for version, _ in trajectory.response.version_spans]
        if incarnation != self._incarnation:
            self._incarnation, self._newest = incarnation, 0
        # A group that finished early and waited for its predecessor may be of older weights than it. After a rollback
        # parts are accepted or refused by this number. It must never fall: otherwise a part would be accepted whose
        # predecessor is refused and generated once more.
        self._newest = max(self._newest, *versions)
        num_tokens = sum(len(trajectory.response.tokens) for trajectory in trajectories)
        self._commits.append(
            table,
            tokens=num_tokens,
            min_policy_version=min(versions),
            max_policy_version=self._newest,
            incarnation=incarnation,
            last_group_id=trajectories[-1].request.group_id,
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
