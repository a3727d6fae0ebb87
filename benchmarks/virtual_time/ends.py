"""What surrounds the product's stages in virtual time: nobody listens, and weights take their time to arrive."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.virtual_time.clock import VirtualClock
from millrace.planning.simulation.costs import Costs
from millrace.runtime.messages import EventKind
from millrace.runtime.stage import Stage
from millrace.training.handover import Handover
from millrace.training.trainer import Trainer
from millrace.weights.base import HandoverReceiver, Manifest, Weights, WeightsId, WeightsSender
from millrace.weights.fingerprint import fingerprint


class SilentStage(Stage):
    """Nobody listens to it."""

    def milestone(self, line: str) -> None:
        """Not sent."""

    def tell(self, kind: EventKind, **payload: Any) -> None:
        """Not sent."""

    def beat(self) -> None:
        """Not sent."""


class Mailbox(HandoverReceiver):
    """Holds the newest version that was put in."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._newest: Weights | None = None

    def put(self, weights: Weights) -> None:
        self._newest = weights
        self._clock.changed()

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        return self._newest if self._newest is not None and self._newest.id.newer_than(newer_than) else None

    def verify(self, weights: Weights) -> None:
        """Nothing is ever damaged."""

    def request_resend(self) -> None:
        """Nothing is ever damaged."""

    def close(self) -> None:
        """Nothing is open."""


class Pushes(WeightsSender):
    """Brings versions to every generator, after the time of a push."""

    def __init__(self, clock: VirtualClock, costs: Callable[[], Costs], arrived: Mailbox) -> None:
        self._clock = clock
        self._costs = costs
        self._arrived = arrived

    def publish(self, weights: Weights) -> None:
        self._clock.sleep(self._costs().push)
        self._arrived.put(weights)

    def close(self) -> None:
        """Nothing is open."""


class TimedHandover(Handover):
    """Hands copies of versions over to the stage that pushes them, while the trainer stands still."""

    def __init__(self, clock: VirtualClock, costs: Callable[[], Costs], trainer: Trainer, handed_over: Mailbox) -> None:
        self._clock = clock
        self._costs = costs
        self._trainer = trainer
        self._handed_over = handed_over

    def offer(self, manifest: Manifest) -> None:
        self._clock.sleep(self._costs().handover)
        tensors = {name: tensor.detach().clone() for name, tensor in self._trainer.weights().items()}
        manifest = replace(manifest, fingerprint=fingerprint(tensors))
        self._handed_over.put(Weights(manifest=manifest, tensors=tensors))

    def is_wanted_again(self) -> bool:
        return False
