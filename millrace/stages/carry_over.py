"""Unfinished responses of a generator, carried over when it ends or the trainer is rolled back.

    drained, or every commit_unfinished_seconds ─► interrupt ─► ║ unfinished/<g> ║ ─► the next process continues them
    weights of a new incarnation ─► interrupt ─► those whose weights exist are continued at once

In sync mode nothing is carried over, so that a step's responses do not depend on the time of a kill.
"""

import time

from millrace.generation.engines.base import Engine
from millrace.rollouts.groups_in_flight import num_tokens
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.unfinished import UnfinishedWriter, read_unfinished
from millrace.rollouts.writer import TrajectoryWriter
from millrace.runtime.stage import Stage
from millrace.stages.admission import Admission
from millrace.types import Trajectory


class CarryOver:
    """The unfinished responses of one generator, from one process or incarnation to the next."""

    def __init__(self, stage: Stage, engine: Engine, admission: Admission, writer: TrajectoryWriter) -> None:
        self._stage = stage
        self._engine = engine
        self._admission = admission
        self._writer = writer
        self._seconds = stage.config.storage.commit_unfinished_seconds
        self._t_stored = time.monotonic()
        self._unfinished: UnfinishedWriter | None = None
        if not admission.by_step:
            self._unfinished = UnfinishedWriter(stage.store, stage.replica, engine.vocab_size)

    def begin(self, incarnation: int, previous: int | None) -> None:
        """Continues under weights of a new incarnation, from the first group that its trainer is missing.

        `previous` is the incarnation of the loaded weights, None before the first.
        """
        lineage = Lineage.of(self._stage.store, incarnation)
        if previous is None:
            # The predecessor's last status record.
            lost = self._stage.value("tokens_in_flight")
            unfinished = read_unfinished(self._stage.store, self._stage.replica) if self._unfinished else []
        else:
            lost = self.tokens_in_flight
            unfinished = [(previous, response) for response in self._interrupt()]
        self._writer.restart(lineage)
        begun = [
            trajectory
            for of_weights, trajectory in unfinished
            if lineage.holds(of_weights, max(version for version, _ in trajectory.response.version_spans))
        ]
        last_group = max([self._writer.groups.last, *(response.request.group_id for response in begun)])
        self._admission.switch_lineage(lineage, last_group)
        num_continued, tokens = self._admission.restart(self._writer.groups, begun)
        self._stage.update_status(
            tokens_in_flight=tokens,
            tokens_stored=0,
            tokens_continued=self._stage.value("tokens_continued") + tokens,
            tokens_discarded=self._stage.value("tokens_discarded") + max(0, lost - tokens),
        )
        if tokens:
            self._stage.log(
                f"generator {self._stage.replica} continues {num_continued} unfinished responses ({tokens} tokens)"
            )

    def store_if_due(self, incarnation: int) -> None:
        """Stores the responses in flight every `commit_unfinished_seconds`, and continues them; never in sync mode."""
        if self._unfinished is None or self._seconds is None:
            return
        if time.monotonic() - self._t_stored >= self._seconds:
            self._admission.restart(self._writer.groups, self.store(incarnation))

    def store(self, incarnation: int) -> list[Trajectory]:
        """Interrupts the responses in flight, stores them for a successor and returns them; nothing in sync mode."""
        self._t_stored = time.monotonic()
        if self._unfinished is None:
            return []
        with self._stage.busy("store_unfinished"):
            interrupted = self._interrupt()
            # Every response is then either in the stream or among the unfinished ones.
            self._writer.flush()
            if interrupted:
                self._unfinished.write(interrupted, incarnation)
        self._stage.update_status(
            now=True, tokens_in_flight=num_tokens(interrupted), tokens_stored=num_tokens(interrupted)
        )
        return interrupted

    @property
    def tokens_in_flight(self) -> int:
        """Response tokens that would be lost with this process if none of them was stored."""
        return self._admission.groups.tokens + self._engine.tokens_in_flight

    def _interrupt(self) -> list[Trajectory]:
        if self._unfinished is None:
            # Allowed while the engine sleeps.
            self._engine.abort()
            self._admission.interrupt([])
            return []
        return self._admission.interrupt(self._engine.interrupt())
