"""The sync_weights stage: takes each version the trainer hands over and delivers it to every generator.

    trainer ─► handover ─► take ─► offer ─► transport ─► generator ×G
                                     │                        │
                  metrics ◄── all acknowledged? ◄── sign of life: incarnation, policy_version

Consumes: the handover. Waits for: a newer version, and for acknowledgements of the last one. Produces: the newest
version at each generator, and a row of metrics a push. It never holds the trainer up: versions that come while it is
busy are skipped for the newest. A generator that takes a version later than the deadline is named.
"""

import time

from millrace.stages.process import Stage, run_stage
from millrace.weights.base import Weights, WeightsId, WeightsReader, WeightsWriter
from millrace.weights.factory import handover_end, push_end
from storage.failpoints import failpoint
from storage.progress import read_life


def main(stage: Stage) -> None:
    """Delivers until asked to drain."""
    stage.ready(f"sync_weights ready, transport {stage.config.weights.transport}")
    Courier(stage, handover_end(stage.arguments.handover)).run()
    stage.milestone(f"sync_weights drained after {stage.value('pushes')} pushes")


class Courier:
    """The loop above."""

    def __init__(self, stage: Stage, reader: WeightsReader) -> None:
        self.stage = stage
        self.reader = reader
        self.writer: WeightsWriter | None = None
        self.arrived: Weights | None = None
        self.taken: WeightsId | None = None
        self.pending: _Delivery | None = None

    def run(self) -> None:
        """Until asked to drain; a version that is on its way then may arrive or not."""
        while self.stage.wait(self._news, why="waiting for a new policy version"):
            if self.arrived is None:
                self.pending = None
            else:
                self._push(self.arrived)

    def _news(self) -> bool:
        """Whether a newer version came, or the last one has arrived everywhere."""
        self.arrived = self.reader.take(self.taken)
        return self.arrived is not None or (self.pending is not None and self.pending.look(self.stage))

    def _push(self, weights: Weights) -> None:
        with self.stage.busy("sync"):
            if self.writer is None:
                self.writer = self._open(weights)
            started = time.monotonic()
            failpoint("sync_weights.before_push")
            self.writer.offer(weights)
            failpoint("sync_weights.after_push")
            self.pending = _Delivery(weights.id, weights.nbytes, time.monotonic() - started)
        self.taken = weights.id
        self.stage.progress(
            pushes=self.stage.value("pushes") + 1,
            policy_version=weights.id.policy_version,
            incarnation=weights.id.incarnation,
        )

    def _open(self, weights: Weights) -> WeightsWriter:
        """The transport to the generators; it takes its tensors' names and shapes from the first version."""
        config = self.stage.config
        return push_end(
            config.weights.transport,
            self.stage.store,
            self.stage.arguments.handover,
            weights.tensors,
            config.generation.replicas,
        )


class _Delivery:
    """A version on its way to the generators."""

    def __init__(self, weights_id: WeightsId, nbytes: int, copy_seconds: float) -> None:
        self.id = weights_id
        self.nbytes = nbytes
        self.copy_seconds = copy_seconds
        self.late: set[int] = set()

    def look(self, stage: Stage) -> bool:
        """Whether every generator has these weights or newer ones; measures the push when they have."""
        generators = range(stage.config.generation.replicas)
        lives = {g: read_life(stage.store, "generate", g) for g in generators}
        waited = time.time() - self.id.t_offered
        missing = [g for g in generators if not _has(lives[g], self.id)]
        if missing:
            failpoint("sync_weights.awaiting_acknowledgement")
            if waited > stage.config.weights.deadline_seconds and not self.late.issuperset(missing):
                names = ", ".join(f"generator {g}" for g in missing)
                stage.milestone(
                    f"version {self.id.policy_version} not taken by {names} after {waited:.0f} s; "
                    "they go on with their last version"
                )
                self.late.update(missing)
            return False
        stage.metrics.log(
            incarnation=self.id.incarnation,
            policy_version=self.id.policy_version,
            push_copy_seconds=self.copy_seconds,
            push_bytes=self.nbytes * len(generators),
            push_seconds=max(lives[g]["t_updated"] for g in generators) - self.id.t_offered,
        )
        return True


def _has(life: dict[str, object], wanted: WeightsId) -> bool:
    incarnation, version = life.get("incarnation", -1), life.get("policy_version", -1)
    assert isinstance(incarnation, int)
    assert isinstance(version, int)
    return (incarnation, version) >= (wanted.incarnation, wanted.policy_version)


if __name__ == "__main__":
    run_stage("sync_weights", main)
