"""The sync_weights stage: takes each version the trainer hands over and brings it to every generator.

    trainer ─► handover ─► take, hash ─► offer ─► transport ──────────────► generator ×G
                               │                     ▲ tend: who came back       │
                               │                                                 ▼
                               └─► store ◄── late ◄── acknowledged? ◄── status record: version, digest
                                                          └─► metrics, milestones

Consumes: the handover. Waits for: a newer version, and for acknowledgements of the last one. Produces: the newest
version at each generator, and a row of metrics per push. It never holds the trainer up: of the versions that come while
it is busy, only the newest is pushed. A generator that has not taken a version by the deadline is named, and the newest
version goes to the run's store for it as well, until it is back. Before that it is verified again. If it is damaged,
the trainer is asked for it once more.
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing

from configs.operation import WeightsConfig
from millrace.errors import WeightsCorrupt
from millrace.runtime.interfaces import own_interface
from millrace.runtime.stage import Stage, run_stage
from millrace.weights.acknowledgements import AckTracker, Arrival
from millrace.weights.base import Weights, WeightsId, WeightsReader, WeightsWriter
from millrace.weights.factory import store_end, sync_weights_ends
from storage.failpoints import failpoint
from storage.progress import read_status

_LOOK_SECONDS = 0.25
"""How often to look at generators that have acknowledged everything: one may have been started again."""
_PUBLISH_SECONDS = 10.0
"""Least time between two events: each is a row in Prefect's database."""


def main(stage: Stage) -> None:
    """Pushes versions until asked to drain."""
    config, store = _listening_here(stage.config.weights), stage.store
    reader, writer = sync_weights_ends(config, store, stage.arguments.handover, stage.config.generation.replicas)
    # A null address replaces a predecessor's, where nothing listens any more.
    stage.progress(transport=config.transport, address=writer.address)
    open_store = store_end(config, store, stage.arguments.handover, writer)
    with closing(reader), closing(writer):
        loop = WeightSyncLoop(stage, reader, writer, open_store)
        stage.ready(f"sync_weights ready, transport {config.transport}")
        loop.run()
    stage.milestone(f"sync_weights drained after {stage.value('pushes')} pushes")


def _listening_here(config: WeightsConfig) -> WeightsConfig:
    """With this host's own address in place of a network."""
    if "/" not in config.host or config.transport != "direct":
        return config
    return config.model_copy(update={"host": own_interface(config.host, "weights.host").address})


class WeightSyncLoop:
    """The loop above.

    `open_store` opens the route for late generators; None if there is no other. `clock` returns unix seconds.
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
        self.replicas = stage.config.generation.replicas
        self.deadline_seconds = stage.config.weights.deadline_seconds
        # Taken last. The reader leaves its tensors as they are until it returns newer ones.
        self.newest: Weights | None = None
        self.store: WeightsWriter | None = None
        self.stored: WeightsId | None = None
        # The newest version is damaged, and the trainer asked for it once more.
        self.asked_again = False
        self.t_stored = self.t_looked = self.t_published = -float("inf")
        falls_back = open_store is not None
        self.acks = AckTracker(
            self.replicas, deadline_seconds=self.deadline_seconds, opened=clock(), falls_back=falls_back
        )
        stage.progress(late=[], fallbacks=stage.value("fallbacks"))

    def run(self) -> None:
        """Runs until asked to drain. A version that is on its way then may arrive or not."""
        while self.stage.wait(self.run_once, why="waiting for a new policy version"):
            pass

    def run_once(self) -> bool:
        """One pass of the loop; returns whether a newer version came and was pushed."""
        if self.acks.awaited or self.clock() - self.t_looked >= _LOOK_SECONDS:
            self._look()
            self._serve_the_late()
        started = time.monotonic()
        weights = self._take()
        if weights is None:
            self.writer.tend()
            return False
        self._push(weights, hash_seconds=time.monotonic() - started)
        return True

    def _take(self) -> Weights | None:
        """Newer weights, or the newest once more if they are damaged."""
        try:
            return self.reader.take(None if self.newest is None or self.asked_again else self.newest.id)
        except WeightsCorrupt as error:
            self._ask_again(error)
            return None

    def _ask_again(self, damage: WeightsCorrupt) -> None:
        if not self.reader.ask_again():
            raise damage
        self.asked_again = True
        self.stage.milestone(f"{damage}: the trainer is asked for them once more")

    def _push(self, weights: Weights, hash_seconds: float) -> None:
        fingerprint = weights.manifest.fingerprint
        assert fingerprint is not None
        self.newest, self.asked_again = weights, False
        with self.stage.busy("sync"):
            # Before the offer: a generator may acknowledge while that still waits for another one.
            self.acks.push(weights.id, fingerprint.digest)
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
            push_bytes=weights.nbytes * self.replicas,
            push_hash_seconds=hash_seconds,
            push_offer_seconds=time.monotonic() - started,
        )

    def _look(self) -> None:
        """Reads the generators' status records: who has acknowledged, and who is late."""
        self.t_looked = self.clock()
        statuses = [read_status(self.stage.store, "generate", g) for g in range(self.replicas)]
        late_before = self.acks.late
        seen = self.acks.look(statuses, self.clock())
        late = self.acks.late
        if late != late_before:
            fallen_back = 0 if self.open_store is None else len(set(late) - set(late_before))
            self.stage.progress(now=True, late=late, fallbacks=self.stage.value("fallbacks") + fallen_back)
        # After the status record: it agrees with the news.
        for news in seen.news:
            self.stage.milestone(news.sentence)
            if news.event is not None:
                self.stage.tell(news.event, generator=news.generator, sentence=news.sentence)
        if seen.arrival is not None:
            self._log(**dataclasses.asdict(seen.arrival))
            self._publish(seen.arrival)
        if self.acks.awaited:
            failpoint("sync_weights.awaiting_acknowledgement")

    def _publish(self, arrival: Arrival) -> None:
        """Sends an event for the version that has arrived, unless it just sent another one."""
        assert self.newest is not None
        if self.clock() - self.t_published < _PUBLISH_SECONDS:
            return
        self.t_published = self.clock()
        self.stage.tell(
            "version.published", policy_version=self.newest.id.policy_version, push_seconds=arrival.push_seconds
        )

    def _serve_the_late(self) -> None:
        """Stores the newest version, at most once per deadline: storing it holds the others up."""
        if not self.acks.late or self.newest is None or self.asked_again or self.newest.id == self.stored:
            return
        if self.clock() - self.t_stored < self.deadline_seconds:
            return
        with self.stage.busy("serve the late"):
            try:
                self.reader.check(self.newest)
            except WeightsCorrupt as error:
                self._ask_again(error)
                return
            if self.open_store is not None:
                if self.store is None:
                    self.store = self.open_store()
                self.store.offer(self.newest)
                self.acks.accept(self.newest.id, self.store.digest_of(self.newest))
        self.stored, self.t_stored = self.newest.id, self.clock()

    def _log(self, **values: float) -> None:
        assert self.newest is not None
        weights_id = self.newest.id
        self.stage.metrics.log(incarnation=weights_id.incarnation, policy_version=weights_id.policy_version, **values)


if __name__ == "__main__":
    run_stage("sync_weights", main)
