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
from millrace.weights.base import Weights, WeightsId, WeightsWriter
from millrace.weights.factory import handover_end, push_end
from storage.progress import read_progress


def main(stage: Stage) -> None:
    """Delivers until asked to drain."""
    reader = handover_end(stage.arguments.handover)
    push: WeightsWriter | None = None
    pending: _Delivery | None = None
    taken: WeightsId | None = None
    arrived: Weights | None = None
    stage.milestone(f"sync_weights ready, transport {stage.config.weights.transport}")

    def news() -> bool:
        nonlocal arrived
        arrived = reader.take(taken)
        return arrived is not None or (pending is not None and pending.look(stage))

    while stage.wait(news, why="waiting for a new policy version"):
        if arrived is None:
            pending = None
            continue
        with stage.busy("sync"):
            if push is None:
                config = stage.config
                push = push_end(
                    config.weights.transport,
                    stage.store,
                    stage.arguments.handover,
                    arrived.tensors,
                    config.generation.replicas,
                )
            started = time.monotonic()
            push.offer(arrived)
            taken = arrived.id
            pending = _Delivery(arrived.id, arrived.nbytes, time.monotonic() - started)
        stage.progress(
            pushes=stage.value("pushes") + 1,
            policy_version=taken.policy_version,
            incarnation=taken.incarnation,
        )
    stage.milestone(f"sync_weights drained after {stage.value('pushes')} pushes")


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
        lives = read_progress(stage.store)
        waited = time.time() - self.id.t_offered
        missing = [g for g in generators if not _has(lives.get(f"generate-{g}", {}), self.id)]
        if missing:
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
            push_seconds=max(lives[f"generate-{g}"]["t_updated"] for g in generators) - self.id.t_offered,
        )
        return True


def _has(life: dict[str, object], wanted: WeightsId) -> bool:
    incarnation, version = life.get("incarnation", -1), life.get("policy_version", -1)
    assert isinstance(incarnation, int)
    assert isinstance(version, int)
    return (incarnation, version) >= (wanted.incarnation, wanted.policy_version)


if __name__ == "__main__":
    run_stage("sync_weights", main)
