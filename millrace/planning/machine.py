"""What a plan asks of a machine: durations, lengths and memory of any config on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from configs.schema import RunConfig
from millrace.planning.durations import Costs, Lengths
from millrace.planning.memory import MemoryReport


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
        """What a GPU of each stage needs; None on the machine of a stored run, where all fitted."""

    def storage(self, config: RunConfig, step_seconds: float) -> tuple[float, float] | None:
        """Bytes that it writes a day with steps of so many seconds, and bytes of a checkpoint; None if unknown."""

    def failures(self, config: RunConfig, step_seconds: float) -> tuple[float, float] | None:
        """Mean seconds between two failures of the trainer, and the share of all time they cost; None if unknown."""

    def assumptions(self, config: RunConfig) -> Sequence[Assumption]:
        """What the figures of a config rest on."""
