"""`direct` for tests that ignore delays: a published version has arrived when `publish` returns.

sender.publish ─► two trainer ranks ─► pushed until all open receivers have it     receiver.poll ─► the same ─► poll
"""

from collections.abc import Callable
from pathlib import Path

from support.weights.direct import PATIENT, Pushes, finder, wait_until
from support.weights.direct_policies import layout_of
from support.weights.versions import mixed_tensors

from millrace.weights.base import Weights, WeightsId, WeightsReceiver, WeightsSender
from millrace.weights.direct.receiver import DirectReceiver


def direct_ends(
    folder: Path, num_generators: int
) -> tuple[Callable[[], WeightsSender], Callable[[int], WeightsReceiver]]:
    """Functions that open a sender, and the receiver of a generator; at most one of each is open at a time."""
    ends = _Ends(folder, num_generators)
    return lambda: _Sender(ends), lambda number: _Receiver(ends, number)


class _Ends:
    """All ends as one transport."""

    def __init__(self, folder: Path, num_generators: int) -> None:
        self.folder = folder
        self.num_generators = num_generators
        self.pushes: Pushes | None = None
        """Of the open sender, once something was published."""
        self.open: set[int] = set()
        """Generators."""

    def wait(self) -> None:
        """Waits until all open generators have the last version."""
        if (pushes := self.pushes) is None:
            return

        def arrived() -> bool:
            pushes.relay.poll(pushes.newest)
            return not pushes.relay.missing & self.open

        wait_until(arrived, "all open generators have the newest version")


class _Sender(Pushes):
    def __init__(self, ends: _Ends) -> None:
        layout = layout_of(mixed_tensors(0), 2)
        super().__init__(ends.folder, ends.num_generators, deadline_seconds=PATIENT, layout=layout)
        self._ends = ends
        ends.pushes = None

    def publish(self, weights: Weights) -> None:
        super().publish(weights)
        self._ends.pushes = self
        self._ends.wait()

    def close(self) -> None:
        self._ends.pushes = None
        super().close()


class _Receiver(WeightsReceiver):
    def __init__(self, ends: _Ends, number: int) -> None:
        self._ends = ends
        self._number = number
        path = ends.folder / f"received-{number}"
        self._receiver = DirectReceiver(finder(ends.folder), number, path, deadline_seconds=PATIENT)
        ends.open.add(number)

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        self._ends.wait()
        return self._receiver.poll(newer_than)

    def close(self) -> None:
        self._ends.open.discard(self._number)
        self._receiver.close()
