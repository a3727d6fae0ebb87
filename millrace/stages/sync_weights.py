"""The sync_weights stage: takes each version the trainer hands over and delivers it to every generator.

    trainer ─► handover ─► take, hash ─► offer ─► transport ──────────────► generator ×G
                               │                     ▲ tend: who came back       │
                               │                                                 ▼
                               └─► store ◄── late ◄── acknowledged? ◄── sign of life: version, digest
                                                          └─► metrics, milestones

Consumes: the handover. Waits for: a newer version, and for acknowledgements of the last one. Produces: the newest
version at each generator, and a row of metrics a push. It never holds the trainer up: versions that come while it is
busy are skipped for the newest. A generator that has not taken a version by the deadline is named; as long as it is
late, the newest version lies in the run's store for it too.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import closing

from millrace.stages.process import Stage, run_stage
from millrace.weights.base import Weights, WeightsId, WeightsReader, WeightsWriter
from millrace.weights.broadcast import BroadcastWriter
from millrace.weights.delivery import Arrival, Deliveries, News
from millrace.weights.factory import handover_end, push_end
from millrace.weights.store import StoreWriter
from storage.failpoints import failpoint
from storage.progress import read_life

_LOOK_SECONDS = 0.25
"""While nobody owes anything, generators are looked at so often: one may have been started again."""
_PUBLISH_SECONDS = 10.0
"""An event is a row in Prefect's database; of versions that come faster than this, not each is told of."""


def main(stage: Stage) -> None:
    """Delivers until asked to drain."""
    weights = stage.config.weights
    reader = handover_end(stage.arguments.handover)
    writer = push_end(
        weights.transport,
        stage.store,
        reader,
        stage.config.generation.replicas,
        host=weights.host,
        deadline_seconds=weights.deadline_seconds,
    )
    stage.progress(
        transport=weights.transport,
        # Null rather than what a predecessor said, where nobody listens any more.
        address=writer.address if isinstance(writer, BroadcastWriter) else None,
    )
    open_store = None if weights.transport == "store" else functools.partial(StoreWriter, stage.store)
    with closing(reader), closing(writer):
        courier = Courier(stage, reader, writer, open_store)
        stage.ready(f"sync_weights ready, transport {weights.transport}")
        courier.run()
    stage.milestone(f"sync_weights drained after {stage.value('pushes')} pushes")


class Courier:
    """The loop above.

    `open_store` opens the way for those who are late; None: there is no other. `clock` tells unix seconds.
    """

    def __init__(
        self,
        stage: Stage,
        reader: WeightsReader,
        writer: WeightsWriter,
        open_store: Callable[[], WeightsWriter] | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.stage = stage
        self.reader = reader
        self.writer = writer
        self.open_store = open_store
        self.clock = clock
        # Taken last. The reader leaves its tensors as they are until it has newer ones to give.
        self.newest: Weights | None = None
        self.store: WeightsWriter | None = None
        self.stored: WeightsId | None = None
        self.t_stored = self.t_looked = self.t_published = -float("inf")
        self.deliveries = Deliveries(
            stage.config.generation.replicas,
            deadline_seconds=stage.config.weights.deadline_seconds,
            opened=clock(),
            falls_back=open_store is not None,
        )
        stage.progress(late=[], fallbacks=stage.value("fallbacks"))

    def run(self) -> None:
        """Until asked to drain; a version that is on its way then may arrive or not."""
        while self.stage.wait(self.turn, why="waiting for a new policy version"):
            pass

    def turn(self) -> bool:
        """Looks once at everything there is to look at; whether a newer version came, and was pushed."""
        if self.deliveries.awaited or self.clock() - self.t_looked >= _LOOK_SECONDS:
            self._look()
            self._serve_the_late()
        started = time.monotonic()
        weights = self.reader.take(None if self.newest is None else self.newest.id)
        if weights is None:
            self.writer.tend()
            return False
        self._push(weights, hash_seconds=time.monotonic() - started)
        return True

    def _push(self, weights: Weights, hash_seconds: float) -> None:
        fingerprint = weights.manifest.fingerprint
        assert fingerprint is not None
        self.newest = weights
        with self.stage.busy("sync"):
            # Before the offer: a generator may acknowledge while that still waits for another one.
            self.deliveries.push(weights.id, fingerprint.digest)
            started = time.monotonic()
            failpoint("sync_weights.before_push")
            self.writer.offer(weights)
            failpoint("sync_weights.after_push")
        self.stage.progress(
            pushes=self.stage.value("pushes") + 1,
            policy_version=weights.id.policy_version,
            incarnation=weights.id.incarnation,
        )
        self._log(
            push_bytes=weights.nbytes * self.stage.config.generation.replicas,
            push_hash_seconds=hash_seconds,
            push_offer_seconds=time.monotonic() - started,
        )

    def _look(self) -> None:
        """For acknowledgements, and for those who should have sent one."""
        self.t_looked = self.clock()
        replicas = self.stage.config.generation.replicas
        lives = [read_life(self.stage.store, "generate", g) for g in range(replicas)]
        late_before = self.deliveries.late
        seen = self.deliveries.look(lives, self.clock())
        late = self.deliveries.late
        if late != late_before:
            fallen_back = 0 if self.open_store is None else len(set(late) - set(late_before))
            self.stage.progress(now=True, late=late, fallbacks=self.stage.value("fallbacks") + fallen_back)
        # Whoever hears the news finds it in the sign of life.
        for news in seen.news:
            self._pass_on(news)
        if seen.arrival is not None:
            self._log(**dataclasses.asdict(seen.arrival))
            self._publish(seen.arrival)
        if self.deliveries.awaited:
            failpoint("sync_weights.awaiting_acknowledgement")

    def _pass_on(self, news: News) -> None:
        self.stage.milestone(news.sentence)
        if news.kind == "lost":
            self.stage.tell("generator.lost", generator=news.generator, sentence=news.sentence)
        elif news.kind == "rejoined":
            self.stage.tell("generator.rejoined", generator=news.generator, sentence=news.sentence)

    def _publish(self, arrival: Arrival) -> None:
        """Tells of the version that has arrived, unless it told of another one just now."""
        assert self.newest is not None
        if self.clock() - self.t_published < _PUBLISH_SECONDS:
            return
        self.t_published = self.clock()
        self.stage.tell(
            "version.published", policy_version=self.newest.id.policy_version, push_seconds=arrival.push_seconds
        )

    def _serve_the_late(self) -> None:
        """The newest version through the store, not more often than once a deadline: storing it holds the others up."""
        if self.newest is None or self.newest.id == self.stored:
            return
        if self.open_store is None or not self.deliveries.late:
            return
        if self.clock() - self.t_stored < self.stage.config.weights.deadline_seconds:
            return
        with self.stage.busy("serve the late"):
            if self.store is None:
                self.store = self.open_store()
            self.store.offer(self.newest)
        self.stored, self.t_stored = self.newest.id, self.clock()

    def _log(self, **values: float) -> None:
        assert self.newest is not None
        weights_id = self.newest.id
        self.stage.metrics.log(incarnation=weights_id.incarnation, policy_version=weights_id.policy_version, **values)


if __name__ == "__main__":
    run_stage("sync_weights", main)
