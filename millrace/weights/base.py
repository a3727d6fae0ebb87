"""How a policy version travels: one writer offers its newest version, readers take it when they are ready.

    trainer ──offer──► handover ──take──► sync_weights ──offer──► transport ──take──► generator ×G

Only the newest version matters: a reader that was busy skips those in between, and a writer never waits for a reader.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch


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
class Weights:
    """A policy version on its way."""

    id: WeightsId
    tensors: Mapping[str, torch.Tensor]
    """By parameter name; tied parameters once. Views of the transport's memory: copy them before the next `take`."""

    @property
    def nbytes(self) -> int:
        """Size of all tensors, bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class WeightsWriter(ABC):
    """The offering end."""

    @abstractmethod
    def offer(self, weights: Weights) -> None:
        """Makes these the newest; returns when a reader could take them."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the transport; what was offered stays."""


class WeightsReader(ABC):
    """The taking end."""

    @abstractmethod
    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest weights if they are newer, else None, without waiting.

        Raises WeightsCorrupt when what arrived fails its checksum.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of the transport."""
