"""What a search asks of a machine: durations, lengths and memory of any config on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from configs.schema import RunConfig
from millrace.planning.costs.campaign import MemoryReport
from millrace.planning.costs.storage import StoredBytes
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """A value that a plan rests on and that is not in the config."""

    what: str
    value: str
    source: str


class Machine(Protocol):
    """Where a plan is to run. Methods raise InputError for a config that they can't judge."""

    @property
    def name(self) -> str:
        """For people."""

    def allows_trainer_tensor(self, size: int) -> bool:
        """Whether so many tensor ranks can divide the model's layers."""

    def allows_generator_tensor(self, size: int) -> bool:
        """Whether an engine can divide the model among so many GPUs."""

    def costs(self, config: RunConfig) -> Costs:
        """How long everything takes."""

    def lengths(self, config: RunConfig) -> Lengths:
        """How long prompts and responses are."""

    def memory(self, config: RunConfig) -> MemoryReport | None:
        """What a GPU of each stage needs; None if memory is no question, as on the machine of a stored run."""

    def storage(self, config: RunConfig, step_seconds: float) -> StoredBytes | None:
        """What it writes with steps of so many seconds; None if unknown."""

    def assumptions(self, config: RunConfig) -> Sequence[Assumption]:
        """What the figures of a config rest on."""
