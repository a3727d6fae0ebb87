"""What a generator keeps of its responses in flight, when it ends or when the trainer was rolled back.

    drained, or every commit_unfinished_seconds ─► interrupt ─► ║ unfinished/<g> ║ ─► the next process continues them
    weights of a new incarnation ─► interrupt ─► those whose weights exist are continued at once

In sync mode nothing is kept, so that a step's responses do not depend on when something was killed.
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
        """Goes on under weights of a new incarnation: back to the first group that its trainer lacks.

        `previous` is the incarnation of the weights that are loaded, None if there are none yet.
        """
        lineage = Lineage.of(self._stage.store, incarnation)
        if previous is None:
            # The predecessor's, by its last status record.
            lost = self._stage.value("tokens_in_flight")
            found = read_unfinished(self._stage.store, self._stage.replica) if self._unfinished else []
        else:
            lost = self.tokens_in_flight
            found = [(previous, one) for one in self._interrupt()]
        self._writer.restart(lineage)
        begun = [one for of_weights, one in found if lineage.holds(of_weights, _newest(one))]
        last_group = max([self._writer.groups.last, *(one.request.group_id for one in begun)])
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

    def store(self, incarnation: int) -> str:
        """Interrupts what is in flight and stores it for a successor; says how much. In sync mode it does nothing."""
        interrupted = self._store(incarnation)
        if not interrupted:
            return ""
        return f"; stored {len(interrupted)} unfinished responses ({num_tokens(interrupted)} tokens)"

    def store_if_due(self, incarnation: int) -> None:
        """Every `commit_unfinished_seconds`: stores what is in flight, and goes on with it. Not in sync mode."""
        if self._unfinished is None or self._seconds is None:
            return
        if time.monotonic() - self._t_stored >= self._seconds:
            self._admission.restart(self._writer.groups, self._store(incarnation))

    def _store(self, incarnation: int) -> list[Trajectory]:
        self._t_stored = time.monotonic()
        if self._unfinished is None:
            return []
        with self._stage.busy("store_unfinished"):
            interrupted = self._interrupt()
            # So that whatever is not in the stream is among the unfinished.
            self._writer.flush()
            if interrupted:
                self._unfinished.write(interrupted, incarnation)
        self._stage.update_status(
            now=True, tokens_in_flight=num_tokens(interrupted), tokens_stored=num_tokens(interrupted)
        )
        return interrupted

    @property
    def tokens_in_flight(self) -> int:
        """Response tokens that would be lost with this process, if nothing of them was stored."""
        return self._admission.groups.tokens + self._engine.tokens_in_flight

    def _interrupt(self) -> list[Trajectory]:
        if self._unfinished is None:
            # Allowed while the engine sleeps.
            self._engine.abort()
            self._admission.interrupted([])
            return []
        return self._admission.interrupted(self._engine.interrupt())


def _newest(trajectory: Trajectory) -> int:
    return max(version for version, _ in trajectory.response.version_spans)
