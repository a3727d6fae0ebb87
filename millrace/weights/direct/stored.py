"""How a version of `direct` comes into the run's store, for generators that are late: sync_weights gets it as well.

    trainer ranks ══push══► a reader of sync_weights' own, for this one version ─► store

The only time that this process holds the whole model.
"""

import dataclasses
from contextlib import closing
from pathlib import Path

from millrace.weights.base import Weights, WeightsWriter
from millrace.weights.direct.control import DirectRelay
from millrace.weights.direct.generator import DirectReader
from millrace.weights.fingerprint import Fingerprint, fingerprint


class DirectStore(WeightsWriter):
    """Has the trainer's ranks send a version here, into files beside `path`, and offers it to `stored`."""

    def __init__(self, relay: DirectRelay, stored: WeightsWriter, path: Path, *, deadline_seconds: float) -> None:
        self._relay = relay
        self._stored = stored
        self._path = path
        self._deadline_seconds = deadline_seconds
        self._fingerprint: Fingerprint | None = None

    def offer(self, weights: Weights) -> None:
        """Stores the version, if it arrives by the deadline; a later call tries again."""
        number = self._relay.num_generators
        with closing(
            DirectReader(lambda: self._relay.address, number, self._path, deadline_seconds=self._deadline_seconds)
        ) as reader:
            self._relay.send_to(number, weights)
            arrived = reader.take(None)
            if arrived is None:
                return
            self._fingerprint = fingerprint(arrived.tensors)
            manifest = dataclasses.replace(arrived.manifest, fingerprint=self._fingerprint)
            self._stored.offer(dataclasses.replace(arrived, manifest=manifest, shared=None))

    def digest_of(self, weights: Weights) -> str:
        return super().digest_of(weights) if self._fingerprint is None else self._fingerprint.digest

    def close(self) -> None:
        self._stored.close()
