"""Weight transports: a sender publishes its newest version, and receivers poll for it when they are ready.

    trainer ─publish─► handover ─poll─► sync_weights ─publish─► transport ─poll─► generator ×G

Only the newest version counts: a busy receiver skips the versions in between, and a sender never waits for a receiver.
A receiver gets whole weights, verified against the fingerprint that sync_weights took at the handover.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter

from millrace.weights.adapter import Adapter
from millrace.weights.fingerprint import Fingerprint
from millrace.weights.shared_tensors import SharedTensors

if TYPE_CHECKING:
    from millrace.weights.live.calls import LiveTransfer


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsId:
    """Identity of a policy's weights. Ordered by incarnation, then by version."""

    incarnation: int
    """Incarnation of the trainer: one more each time a trainer of the run starts."""
    policy_version: int
    """0 is the base model; optimizer step k yields version k."""
    t_offered: float
    """Time of the handover by the trainer, unix seconds."""

    def newer_than(self, other: "WeightsId | None") -> bool:
        """Whether these supersede `other`."""
        return other is None or (self.incarnation, self.policy_version) > (other.incarnation, other.policy_version)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The trainer's log-probabilities after fixed tokens. A generator of the same version must agree."""

    tokens: tuple[int, ...]
    """[P] token ids."""
    logprobs: Mapping[int, float]
    """Likeliest next token ids → their log π, nats, at temperature 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Metadata of a policy version; travels with its tensors on every transport."""

    id: WeightsId
    probe: Probe | None = None
    fingerprint: Fingerprint | None = None
    """None only between the trainer and sync_weights, which computes it: hashing would delay the trainer."""
    adapter: Adapter | None = None
    """Shape of the LoRA adapter on the run's start model that the tensors are; None: they are the whole model."""
    max_staleness: int | None = None
    """Bound by which a generator with these weights admits groups, policy versions; None: as configured."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        values: dict[str, Any] = _MANIFEST.dump_python(self, mode="json")
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Manifest":
        """The inverse of `to_json`. Raises ValueError if the values are not a manifest's."""
        return _MANIFEST.validate_python(values)


_MANIFEST = TypeAdapter(Manifest)
"""Made once: making it takes milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A policy version in transit."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    """By parameter name, tied parameters once; of an adapter by PEFT's name. Views of the transport's memory: copy them
    before the next `poll`."""
    live: "LiveTransfer | None" = None
    """The push that brings the tensors into the running engine; `tensors` is empty then."""
    shared: SharedTensors | None = None
    """The file in which other processes of this host find the same bytes until the next `poll`; receivers set it."""

    @property
    def id(self) -> WeightsId:
        """The manifest's."""
        return self.manifest.id

    @property
    def fingerprint(self) -> Fingerprint:
        """The manifest's. Raises ValueError if it has none."""
        if self.manifest.fingerprint is None:
            raise ValueError(f"version {self.id.policy_version} has no fingerprint to verify it by")
        return self.manifest.fingerprint

    @property
    def nbytes(self) -> int:
        """Size of all tensors, bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class WeightsSender(ABC):
    """The sending end of a transport."""

    address: str | None = None
    """`host:port` where generators find this; None for a transport that does not listen."""

    @abstractmethod
    def publish(self, weights: Weights) -> None:
        """Makes `weights` the newest version; returns when receivers can get it."""

    @abstractmethod
    def close(self) -> None:
        """Releases the transport; published versions stay. May be called again."""


class WeightsReceiver(ABC):
    """The receiving end of a transport."""

    @abstractmethod
    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """Returns the newest weights, whole and verified, if they are newer; None otherwise.

        Raises WeightsCorrupt, naming the tensors, if they do not match their manifest's fingerprint.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases the transport. May be called again."""


class HandoverSender(WeightsSender):
    """The trainer's end of the handover."""

    @abstractmethod
    def resend_requested(self) -> bool:
        """Whether the last version must be published again, because it was lost or damaged."""


class HandoverReceiver(WeightsReceiver):
    """sync_weights' end of the handover."""

    @abstractmethod
    def verify(self, weights: Weights) -> None:
        """Raises WeightsCorrupt, naming the tensors, if `weights`, received last and still the newest, have changed."""

    @abstractmethod
    def request_resend(self) -> None:
        """Asks the trainer to resend the damaged version; until it arrives, `poll` returns None."""
