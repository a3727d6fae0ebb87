"""How a policy version travels: one writer offers its newest version, readers take it when they are ready.

    trainer ──offer──► handover ──take──► sync_weights ──offer──► transport ──take──► generator ×G

Only the newest version matters: a reader that was busy skips those in between, and a writer never waits for a reader.
What a reader takes is whole and verified: every tensor has the hash that sync_weights computed from what the trainer
handed over.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from millrace.weights.fingerprint import Fingerprint
from millrace.weights.shared_tensors import SharedTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsId:
    """Which weights these are. Ordered: first by incarnation, then by version."""

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
    """The trainer's log-probabilities after fixed tokens. A generator of the same version must agree."""

    tokens: tuple[int, ...]
    """[P] token ids."""
    logprobs: Mapping[int, float]
    """Likeliest next token ids → their log π, nats, at temperature 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """How far a generator may run ahead under these weights, and how wide (`millrace.control`)."""

    max_staleness: int
    """Staleness bound by which it admits groups, policy versions."""
    places: int
    """Requests that it may have in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything about a policy version but its tensors; travels with them on every transport."""

    id: WeightsId
    probe: Probe | None = None
    fingerprint: Fingerprint | None = None
    """None only between the trainer and sync_weights, which computes it: hashing would hold the trainer up."""
    terms: Terms | None = None
    """None: those of the config."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        values = asdict(self)
        if self.probe is not None:
            logprobs = {str(token): logprob for token, logprob in self.probe.logprobs.items()}
            values["probe"] = {"tokens": list(self.probe.tokens), "logprobs": logprobs}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Manifest":
        """The inverse of `to_json`. Raises KeyError or TypeError if the values are not a manifest's."""
        probe, fingerprint = values["probe"], values["fingerprint"]
        # Stored versions of earlier releases have none.
        terms = values.get("terms")
        if probe is not None:
            logprobs = {int(token): logprob for token, logprob in probe["logprobs"].items()}
            probe = Probe(tokens=tuple(probe["tokens"]), logprobs=logprobs)
        return cls(
            id=WeightsId(**values["id"]),
            probe=probe,
            fingerprint=None if fingerprint is None else Fingerprint(**fingerprint),
            terms=None if terms is None else Terms(**terms),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A policy version on its way."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    """By parameter name; tied parameters once. Views of the transport's memory: copy them before the next `take`."""
    shared: SharedTensors | None = None
    """Where other processes of this host find the same bytes until the next `take`; every reader sets it."""

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

    address: str | None = None
    """`host:port` where generators find this; None for a transport that does not listen."""

    @abstractmethod
    def offer(self, weights: Weights) -> None:
        """Makes these the newest; returns when a reader could take them."""

    def is_wanted_again(self) -> bool:
        """Whether readers need what was offered last once more, because it has been lost or damaged since."""
        return False

    def digest_of(self, weights: Weights) -> str:
        """The digest with which readers acknowledge what was offered last. Raises ValueError if it has none."""
        if weights.manifest.fingerprint is None:
            raise ValueError(f"version {weights.id.policy_version} has no fingerprint to verify it by")
        return weights.manifest.fingerprint.digest

    def tend(self) -> None:  # noqa: B027 — most have nothing to do here
        """Serves readers that came late, without waiting for any. Most transports let readers help themselves."""

    @abstractmethod
    def close(self) -> None:
        """Releases the transport; what was offered stays. May be called again."""


class WeightsReader(ABC):
    """The taking end."""

    @abstractmethod
    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest weights if they are newer, whole and verified; else None.

        Raises WeightsCorrupt, naming the tensors, if what arrived does not have its manifest's hashes.
        """

    def check(self, weights: Weights) -> None:  # noqa: B027 — most copy what they take
        """Raises WeightsCorrupt, naming the tensors, if `weights`, taken last and still the newest, have changed."""

    def ask_again(self) -> bool:
        """Asks the writer once more for what `take` or `check` found damaged; until it comes, `take` returns None.

        Returns False if this transport can't ask.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Releases the transport. May be called again."""
