"""The sync_weights stage: takes each version the trainer hands over and brings it to every generator.

    trainer ─► handover ─► poll, hash ─► publish ─► transport ────────────► generator ×G
                               │                                                 │
                               │                                                 ▼
                               └─► store ◄── late ◄── acknowledged? ◄── status record: version, digest
                                                          └─► metrics, events

It never delays the trainer: of the versions that arrive while
it is busy, only the newest is pushed. A generator that has not loaded a version by the deadline is reported as late.
Until it has caught up, the newest version is written to the run's store as well. It is verified again before that; if
it is damaged, the trainer must resend it.
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing

from configs.operation import choose_transport
from millrace.errors import WeightsCorrupt
from millrace.runtime.entry import run_stage
from millrace.runtime.heartbeat import own_interface
from millrace.runtime.stage import Stage
from millrace.weights.acknowledgements import AckTracker
from millrace.weights.base import HandoverReceiver, Weights, WeightsId, WeightsSender
from millrace.weights.factory import sync_weights_ends
from storage.failpoints import failpoint
from storage.progress import read_status

_LOOK_SECONDS = 0.25
"""Time between two checks of generators that have acknowledged everything: one may have restarted."""
_PUBLISH_SECONDS = 10.0
"""Minimum time between two events: each is a row in Prefect's database."""


def main(stage: Stage) -> None:
    """Pushes versions until asked to drain."""
    config, network = stage.config.effective_weights, stage.config.placement.train.network
    receiver, sender, open_store = sync_weights_ends(
        config,
        stage.store,
        stage.arguments.handover,
        stage.config.generation.replicas,
        host="127.0.0.1" if network is None else own_interface(network)[1],
        log=stage.log,
    )
    # A null address replaces a predecessor's, where nothing listens any more.
    stage.update_status(transport=config.transport, address=sender.address)
    with closing(receiver), closing(sender):
        loop = WeightSyncLoop(stage, receiver, sender, open_store)
        reason = choose_transport(stage.config).reason
        stage.mark_ready(f"sync_weights ready, transport {config.transport}: {reason}")
        loop.run()
    stage.log(f"sync_weights drained after {stage.value('pushes')} pushes")


class WeightSyncLoop:
    """The loop above.

    `open_store` opens the route for late generators; None without one. `clock` returns unix seconds.
    """

    def __init__(
        self,
        stage: Stage,
        receiver: HandoverReceiver,
        sender: WeightsSender,
        open_store: Callable[[], WeightsSender] | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.stage = stage
        self.receiver = receiver
        self.sender = sender
        self.open_store = open_store
        self.clock = clock
        self.replicas = stage.config.generation.replicas
        self.deadline_seconds = stage.config.weights.deadline_seconds
        # The receiver does not change these tensors until it returns newer ones.
        self.newest: Weights | None = None
        self.store: WeightsSender | None = None
        self.stored: WeightsId | None = None
        # Whether the newest version is damaged, and the trainer was asked to resend it.
        self.resend_requested = False
        self.t_stored = self.t_looked = self.t_published = -float("inf")
        falls_back = open_store is not None
        self.acks = AckTracker(
            self.replicas, deadline_seconds=self.deadline_seconds, opened=clock(), falls_back=falls_back
        )
        stage.update_status(late=[], fallbacks=stage.value("fallbacks"))

    def run(self) -> None:
        """Runs until asked to drain. A version that is being pushed then may arrive or not."""
        while self.stage.wait(self.run_once, why="waiting for a new policy version"):
            pass

    def run_once(self) -> bool:
        """One pass of the loop; returns whether a newer version came and was pushed."""
        if self.acks.awaited or self.clock() - self.t_looked >= _LOOK_SECONDS:
            self._look()
            self._store_for_late()
        started = time.monotonic()
        weights = self._poll()
        if weights is None:
            return False
        self._push(weights, hash_seconds=time.monotonic() - started)
        return True

    def _poll(self) -> Weights | None:
        """Returns newer weights, or the newest again if they are damaged."""
        try:
            return self.receiver.poll(None if self.newest is None or self.resend_requested else self.newest.id)
        except WeightsCorrupt as error:
            self._request_resend(error)
            return None

    def _request_resend(self, damage: WeightsCorrupt) -> None:
        self.receiver.request_resend()
        self.resend_requested = True
        self.stage.log(f"{damage}: the trainer is asked to resend them")

    def _push(self, weights: Weights, hash_seconds: float) -> None:
        self.newest, self.resend_requested = weights, False
        with self.stage.busy("sync"):
            # Before `publish`, because a generator may acknowledge while `publish` still waits for another one.
            self.acks.push(weights.id, weights.fingerprint.digest)
            started = time.monotonic()
            failpoint("sync_weights.before_push")
            self.sender.publish(weights)
            failpoint("sync_weights.after_push")
        self.stage.update_status(
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
        """Reads the generators' status records: which have acknowledged, and which are late."""
        self.t_looked = self.clock()
        statuses = [read_status(self.stage.store, "generate", g) for g in range(self.replicas)]
        late_before = self.acks.late
        notifications, arrival = self.acks.look(statuses, self.clock())
        late = self.acks.late
        if late != late_before:
            fallen_back = 0 if self.open_store is None else len(set(late) - set(late_before))
            self.stage.update_status(now=True, late=late, fallbacks=self.stage.value("fallbacks") + fallen_back)
        # After the status record, so that it agrees with the notifications.
        for notification in notifications:
            self.stage.log(notification.sentence)
            if notification.event is not None:
                self.stage.emit_event(
                    notification.event, generator=notification.generator, sentence=notification.sentence
                )
        if arrival is not None and self.newest is not None:
            self._log(**dataclasses.asdict(arrival))
            if self.clock() - self.t_published >= _PUBLISH_SECONDS:
                self.t_published = self.clock()
                version = self.newest.id.policy_version
                self.stage.emit_event("version.published", policy_version=version, push_seconds=arrival.push_seconds)
        if self.acks.awaited:
            failpoint("sync_weights.awaiting_acknowledgement")

    def _store_for_late(self) -> None:
        """Stores the newest version for late generators, at most once per deadline: storing delays pushes."""
        if not self.acks.late or self.newest is None or self.resend_requested or self.newest.id == self.stored:
            return
        if self.clock() - self.t_stored < self.deadline_seconds:
            return
        with self.stage.busy("store for late generators"):
            try:
                self.receiver.verify(self.newest)
            except WeightsCorrupt as error:
                self._request_resend(error)
                return
            if self.open_store is not None:
                self.store = self.store or self.open_store()
                self.store.publish(self.newest)
        self.stored, self.t_stored = self.newest.id, self.clock()

    def _log(self, **values: float) -> None:
        assert self.newest is not None
        weights_id = self.newest.id
        self.stage.metrics.log(incarnation=weights_id.incarnation, policy_version=weights_id.policy_version, **values)


if __name__ == "__main__":
    run_stage("sync_weights", main)
