"""A machine that a plan is for, and a config that it considers there, with what is known of it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from configs.schema import RunConfig
from configs.stored import put_key
from millrace.planning.durations import Assumption, Costs, Lengths
from millrace.planning.gpus import generator_gpus, num_gpus
from millrace.planning.memory import MemoryReport
from millrace.planning.simulation import Outcome
from millrace.runs.figures import find_bottleneck

Goal = Literal["fastest", "cheapest"]


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A config, in which keys it differs from the given one, and what it would do if that has been computed."""

    config: RunConfig
    overrides: Mapping[str, Any]
    """Dotted key → value."""
    divides_gpus: bool = True
    """Whether trainer and generators divide GPUs; not on the machine of a stored run."""
    memory: MemoryReport | None = None
    costs: Costs | None = None
    outcome: Outcome | None = None
    """Simulated; None if it was not, or does not fit."""
    storage: tuple[float, float] | None = None
    """Bytes that it writes a day, and bytes of a checkpoint."""
    failures: tuple[float, float] | None = None
    """Mean seconds between two failures of the trainer, and the share of all time that they cost."""
    reason: str = ""
    """Why it lost, or why it was considered; empty for the winner."""

    @property
    def gpus(self) -> int | None:
        """That it uses; None if they are not divided."""
        return num_gpus(self.config) if self.divides_gpus else None

    @property
    def trainer_gpus(self) -> int:
        """One per rank."""
        parallel = self.config.training.parallel
        return parallel.data * parallel.tensor

    @property
    def generator_tensor(self) -> int:
        """GPUs of one generator."""
        return generator_gpus(self.config)

    @property
    def layout(self) -> tuple[object, ...]:
        """What distinguishes its use of the machine from another's; places and bound aside."""
        config, parallel = self.config, self.config.training.parallel
        return (
            config.training.groups_per_step,
            config.pipeline.mode,
            config.placement.colocated,
            parallel.data,
            parallel.tensor,
            config.generation.replicas,
            self.generator_tensor,
        )

    @property
    def gpu_hours_per_million_tokens(self) -> float | None:
        """Of response tokens trained."""
        if self.outcome is None or self.gpus is None or not self.outcome.tokens_per_second:
            return None
        return self.gpus * 1e6 / self.outcome.tokens_per_second / 3600

    def score(self, goal: Goal) -> float:
        """Higher is better. Raises ValueError for a candidate without an outcome."""
        if self.outcome is None:
            raise ValueError("nothing was simulated")
        rate = self.outcome.tokens_per_second
        return rate / self.gpus if goal == "cheapest" and self.gpus else rate

    @property
    def bottleneck(self) -> str | None:
        """What holds the pipeline up, with idle shares; None without an outcome."""
        if self.outcome is None:
            return None
        push = 0.0 if self.costs is None else self.costs.push
        is_sync, seconds = self.config.pipeline.mode == "sync", self.outcome.step_seconds
        return find_bottleneck(self.outcome.idle, sync=is_sync, step_seconds=seconds, push=push).sentence

    @property
    def trainer(self) -> str:
        """Its GPUs, data × tensor ranks."""
        parallel = self.config.training.parallel
        return f"{self.trainer_gpus} = {parallel.data} × TP{parallel.tensor}"

    @property
    def generators(self) -> str:
        """Their GPUs, replicas × GPUs of each; the number of replicas where GPUs are not divided."""
        replicas, tensor = self.config.generation.replicas, self.generator_tensor
        return f"{replicas * tensor} = {replicas} × TP{tensor}" if self.divides_gpus else str(replicas)

    @property
    def mode(self) -> str:
        """How stages are scheduled."""
        if self.config.placement.colocated:
            return "sync, by turns"
        return "sync" if self.config.pipeline.mode == "sync" else f"async ≤ {self.config.effective_max_staleness}"

    def to_json(self) -> dict[str, Any]:
        """Everything, plain JSON."""
        config, costs, memory = self.config, self.costs, self.memory
        return {
            "overrides": dict(self.overrides),
            "gpus": self.gpus,
            "trainer": {"data": config.training.parallel.data, "tensor": config.training.parallel.tensor},
            "generators": {
                "replicas": config.generation.replicas,
                "tensor": self.generator_tensor,
                "groups_per_batch": config.generation.groups_per_batch,
            },
            "mode": config.pipeline.mode,
            "colocated": config.placement.colocated,
            "max_staleness": config.effective_max_staleness,
            "outcome": self.outcome and {**asdict(self.outcome), "idle": dict(self.outcome.idle)},
            "weight_sync_seconds": costs and {"handover": costs.handover, "push": costs.push, "pause": costs.pause},
            "bottleneck": self.bottleneck,
            "gpu_hours_per_million_tokens": self.gpu_hours_per_million_tokens,
            "memory_bytes_per_gpu": memory and {"trainer": memory.trainer, "generator": memory.generator},
            "memory_shortage": memory and memory.sentence,
            "stored_bytes_per_day": self.storage and self.storage[0],
            "reason": self.reason,
        }


def explicit_values(config: RunConfig) -> dict[str, Any]:
    """Returns what was set of a config, as JSON: what a file with it would hold."""
    return config.model_dump(mode="json", exclude_unset=True)


def changed(base: RunConfig, overrides: Mapping[str, Any], machine: Machine, *, divides_gpus: bool) -> Candidate | None:
    """Returns `base` with `overrides`, and whether it fits into memory; None if the settings can't be combined."""
    values = copy.deepcopy(explicit_values(base))
    for key, value in overrides.items():
        put_key(values, key, value)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError:
        return None
    return Candidate(config=config, overrides=overrides, divides_gpus=divides_gpus, memory=machine.memory(config))
