"""How a policy version travels: one writer offers its newest version, readers take it when they are ready.

    trainer ──offer──► handover ──take──► sync_weights ──offer──► transport ──take──► generator ×G

Only the newest version matters: a reader that was busy skips those in between, and a writer never waits for a reader.
What a reader takes is whole and verified: every tensor has the hash that sync_weights found in what the trainer handed
over.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from millrace.weights.fingerprint import Fingerprint
from millrace.weights.shared import SharedTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsId:
    """Which weights these are. Ordered: a later incarnation is newer, within one the higher version is."""

    incarnation: int
    """Of the trainer: grows by one each time a trainer of the run starts."""
    policy_version: int
    """0 is the base model; optimizer step k yields version k."""
    t_offered: float
    """When the trainer handed them over, unix seconds."""

    def newer_than(self, other: "WeightsId | None") -> bool:
        """Whether these supersede `other`."""
        return other is None or (self.incarnation, self.policy_version) > (other.incarnation, other.policy_version)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What the trainer says of fixed tokens under a version. A generator of that version must say the same."""

    tokens: tuple[int, ...]
    """[P] token ids."""
    logprobs: Mapping[int, float]
    """Token id → log π that it comes next, nats, at temperature 1: of the likeliest ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that is said of a policy version beside its tensors; travels with them on every transport."""

    id: WeightsId
    probe: Probe | None = None
    fingerprint: Fingerprint | None = None
    """None only between the trainer and sync_weights, which takes it: hashing would hold the trainer up."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        values = asdict(self)
        if self.probe is not None:
            logprobs = {str(token): logprob for token, logprob in self.probe.logprobs.items()}
            values["probe"] = {"tokens": list(self.probe.tokens), "logprobs": logprobs}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Manifest":
        """The inverse of `to_json`. Raises KeyError or TypeError where the values are not a manifest's."""
        probe, fingerprint = values["probe"], values["fingerprint"]
        return cls(
            id=WeightsId(**values["id"]),
            probe=None
            if probe is None
            else Probe(
                tokens=tuple(probe["tokens"]),
                logprobs={int(token): logprob for token, logprob in probe["logprobs"].items()},
            ),
            fingerprint=None if fingerprint is None else Fingerprint(**fingerprint),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A policy version on its way."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    """By parameter name; tied parameters once. Views of the transport's memory: copy them before the next `take`."""
    shared: SharedTensors | None = None
    """Where the same bytes lie for other processes of this host, until the next `take`; a reader always says it."""

    @property
    def id(self) -> WeightsId:
        """Which weights these are."""
        return self.manifest.id

    @property
    def nbytes(self) -> int:
        """Size of all tensors, bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class WeightsWriter(ABC):
    """The offering end."""

    @abstractmethod
    def offer(self, weights: Weights) -> None:
        """Makes these the newest; returns when a reader could take them."""

    def tend(self) -> None:  # noqa: B027 — most have nothing to do here
        """Serves readers that came late, without waiting for any. Most transports let readers help themselves."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the transport; what was offered stays."""


class WeightsReader(ABC):
    """The taking end."""

    @abstractmethod
    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest weights if they are newer, whole and verified; else None.

        Raises WeightsCorrupt, naming the tensors, when what arrived has not the hashes its manifest says.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of the transport."""
