"""`direct` for tests that know nothing of who is late: what is offered has arrived afterwards.

writer.offer ─► two trainer ranks ─► pushed until all open readers have it          reader.take ─► the same ─► take
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from support.weights.direct import PATIENT, ShardedTrainer, finder, layout_of, publish_address, wait_until
from support.weights.mixed_versions import tensors_of

from millrace.weights.base import Weights, WeightsId, WeightsReader, WeightsWriter
from millrace.weights.direct.control import DirectRelay
from millrace.weights.direct.generator import DirectReader
from millrace.weights.direct.sums import as_hex, region_sums
from millrace.weights.fingerprint import Fingerprint

RANKS = 2


def direct_ends(
    folder: Path, num_generators: int
) -> tuple[Callable[[], WeightsWriter], Callable[[int], WeightsReader]]:
    """What opens a writer, and what opens the reader of a generator; at most one of each is open at a time."""
    ends = _Ends(folder, num_generators)
    return lambda: _Writer(ends), lambda number: _Reader(ends, number)


def fingerprint_of_sums(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """What sync_weights says of these by `direct`, here from the whole tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    boxes = {name: tuple((0, extent) for extent in shape) for name, shape in shapes.items()}
    sums = region_sums(tensors, boxes, shapes)
    return Fingerprint(tensors={name: as_hex(value) for name, value in sums.items()})


class _Ends:
    """All ends as one transport."""

    def __init__(self, folder: Path, num_generators: int) -> None:
        self.folder = folder
        self.num_generators = num_generators
        self.relay: DirectRelay | None = None
        """Of the open writer, once something was offered."""
        self.open: set[int] = set()
        """Generators."""

    def wait(self) -> None:
        """Until all open generators have what was offered last."""
        if (relay := self.relay) is None:
            return

        def arrived() -> bool:
            relay.tend()
            return not relay.missing & self.open

        wait_until(arrived, "all open generators have the newest version")


class _Writer(WeightsWriter):
    """Trainer and sync_weights."""

    def __init__(self, ends: _Ends) -> None:
        self._ends = ends
        self._relay = DirectRelay(ends.num_generators, deadline_seconds=PATIENT)
        publish_address(ends.folder, self._relay.address)
        layout = layout_of(tensors_of(0), RANKS)
        self._trainer = ShardedTrainer(finder(ends.folder), layout, deadline_seconds=PATIENT)
        self._newest: WeightsId | None = None
        ends.relay = None

    def offer(self, weights: Weights) -> None:
        self._trainer.offer(weights)
        taken: list[Weights] = []

        def offered() -> bool:
            found = self._relay.take(self._newest)
            taken.extend([] if found is None else [found])
            return bool(taken)

        wait_until(offered, "the trainer's ranks have offered it")
        self._newest = taken[0].id
        self._relay.offer(taken[0])
        self._ends.relay = self._relay
        self._ends.wait()

    def close(self) -> None:
        self._ends.relay = None
        self._trainer.close()
        self._relay.close()


class _Reader(WeightsReader):
    """A taking one."""

    def __init__(self, ends: _Ends, number: int) -> None:
        self._ends = ends
        self._number = number
        path = ends.folder / f"received-{number}"
        self._reader = DirectReader(finder(ends.folder), number, path, deadline_seconds=PATIENT)
        ends.open.add(number)

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        self._ends.wait()
        return self._reader.take(newer_than)

    def close(self) -> None:
        self._ends.open.discard(self._number)
        self._reader.close()
