"""Broadcast for tests that know nothing of who is late: what is offered has arrived afterwards.

writer.offer ─► tend until all open readers have it          reader.take ─► tend until this one has it, too ─► take
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from support.weights.broadcasting import PATIENT, finder, publish_address, tend_until_missing

from millrace.weights.base import Weights, WeightsId, WeightsReader, WeightsWriter
from millrace.weights.broadcast import BroadcastReader, BroadcastWriter
from millrace.weights.fingerprint import fingerprint


def broadcast_ends(
    folder: Path, num_generators: int
) -> tuple[Callable[[], WeightsWriter], Callable[[int], WeightsReader]]:
    """What opens a writer, and what opens the reader of a generator; at most one of each is open at a time."""
    ends = _Ends(folder, num_generators)
    return lambda: _Writer(ends), lambda number: _Reader(ends, number)


class _Ends:
    """Both ends as one transport: what is offered is with all open readers afterwards, and late ones are waited for."""

    def __init__(self, folder: Path, num_generators: int) -> None:
        self.folder = folder
        self.num_generators = num_generators
        self.newest: BroadcastWriter | None = None
        """Of the writers; None before anything was offered."""
        self.open: set[int] = set()
        """Generators."""

    def wait(self) -> None:
        """Until all open generators have what was offered last."""
        if self.newest is not None:
            never_came = set(range(self.num_generators)) - self.open
            tend_until_missing(self.newest, self.newest.missing & never_came)


class _Writer(WeightsWriter):
    """The offering one; takes the fingerprint itself."""

    def __init__(self, ends: _Ends) -> None:
        self._ends = ends
        self._writer = BroadcastWriter(ends.num_generators, deadline_seconds=PATIENT)
        publish_address(ends.folder, self._writer.address)
        ends.newest = None

    def offer(self, weights: Weights) -> None:
        manifest = dataclasses.replace(weights.manifest, fingerprint=fingerprint(weights.tensors))
        self._writer.offer(dataclasses.replace(weights, manifest=manifest))
        self._ends.newest = self._writer
        self._ends.wait()

    def close(self) -> None:
        self._ends.newest = None
        self._writer.close()


class _Reader(WeightsReader):
    """A taking one."""

    def __init__(self, ends: _Ends, number: int) -> None:
        self._ends = ends
        self._number = number
        path = ends.folder / f"received-{number}"
        self._reader = BroadcastReader(finder(ends.folder), number, path, deadline_seconds=PATIENT)
        ends.open.add(number)

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        self._ends.wait()
        return self._reader.take(newer_than)

    def close(self) -> None:
        self._ends.open.discard(self._number)
        self._reader.close()
