"""A machine that a plan is for, and a config that the plan considers there, with its predicted figures."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from configs.schema import RunConfig
from configs.stored import put_key
from millrace.planning.durations import Assumption, Costs, Lengths
from millrace.planning.gpus import generator_gpus, num_gpus
from millrace.planning.memory import MemoryReport
from millrace.planning.simulation import Outcome
from millrace.planning.training import trainer_gpus
from millrace.planning.transfers import Upkeep
from millrace.runs.status import find_bottleneck

Goal = Literal["fastest", "cheapest"]
Simulate = Callable[[RunConfig, Costs, Lengths], Outcome]


class Machine(Protocol):
    """The machine of a plan. Methods raise InputError for a config that they can't judge."""

    @property
    def name(self) -> str:
        """Name for people."""

    @property
    def divides_gpus(self) -> bool:
        """Whether trainer and generators divide its GPUs; not on the machine of a stored run."""

    def allows_trainer_tensor(self, size: int) -> bool:
        """Whether this number of tensor ranks can divide the model's layers."""

    def allows_generator_tensor(self, size: int) -> bool:
        """Whether an engine can divide the model among this number of GPUs."""

    def costs(self, config: RunConfig) -> Costs:
        """Returns durations."""

    def lengths(self, config: RunConfig) -> Lengths:
        """Returns lengths of prompts and responses."""

    def memory(self, config: RunConfig) -> MemoryReport | None:
        """Returns the memory of a GPU of each stage; None on the machine of a stored run, where all fitted."""

    def upkeep(self, config: RunConfig, step_seconds: float) -> Upkeep | None:
        """Returns stored bytes and the cost of failures for this step time; None if unknown."""

    def assumptions(self, config: RunConfig) -> Sequence[Assumption]:
        """Lists the assumptions behind the figures of a config."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A config, its differences from the given one, and its predicted figures if it was simulated."""

    config: RunConfig
    overrides: Mapping[str, Any]
    """Dotted key → value."""
    divides_gpus: bool = True
    memory: MemoryReport | None = None
    costs: Costs | None = None
    outcome: Outcome | None = None
    """None if it was not simulated, or does not fit."""
    upkeep: Upkeep | None = None
    reason: str = ""
    """Why it lost, or why it was considered; empty for the winner."""

    @property
    def gpus(self) -> int | None:
        """Number of GPUs that it uses; None if they are not divided."""
        return num_gpus(self.config) if self.divides_gpus else None

    @property
    def trainer_gpus(self) -> int:
        return trainer_gpus(self.config)

    @property
    def generator_tensor(self) -> int:
        """GPUs of one generator."""
        return generator_gpus(self.config)

    @property
    def split(self) -> tuple[int, ...]:
        """GPUs of the trainer and of one generator; the number of generators where GPUs are not divided."""
        return (self.trainer_gpus, self.generator_tensor) if self.divides_gpus else (self.config.generation.replicas,)

    @property
    def gpu_hours_per_million_tokens(self) -> float | None:
        """Per million response tokens trained."""
        if self.outcome is None or self.gpus is None or not self.outcome.tokens_per_second:
            return None
        return self.gpus * 1e6 / self.outcome.tokens_per_second / 3600

    def score(self, goal: Goal) -> float:
        """Returns a figure of merit; higher is better. Raises ValueError for a candidate without an outcome."""
        if self.outcome is None:
            raise ValueError("nothing was simulated")
        rate = self.outcome.tokens_per_second
        return rate / self.gpus if goal == "cheapest" and self.gpus else rate

    @property
    def bottleneck(self) -> str | None:
        """The bottleneck in a sentence, with idle shares; None without an outcome."""
        if self.outcome is None:
            return None
        push = 0.0 if self.costs is None else self.costs.push
        is_sync, seconds = self.config.pipeline.mode == "sync", self.outcome.step_seconds
        return find_bottleneck(self.outcome.idle, sync=is_sync, step_seconds=seconds, push=push).sentence

    @property
    def trainer(self) -> str:
        """The trainer's GPUs, data × tensor ranks."""
        parallel = self.config.training.parallel
        return f"{self.trainer_gpus} = {parallel.data} × TP{parallel.tensor}"

    @property
    def generators(self) -> str:
        """The generators' GPUs, replicas × GPUs of each; the number of replicas where GPUs are not divided."""
        replicas, tensor = self.config.generation.replicas, self.generator_tensor
        return f"{replicas * tensor} = {replicas} × TP{tensor}" if self.divides_gpus else str(replicas)

    @property
    def mode(self) -> str:
        """How stages are scheduled."""
        if self.config.placement.colocated:
            return "sync, by turns"
        return "sync" if self.config.pipeline.mode == "sync" else f"async ≤ {self.config.effective_max_staleness}"

    def to_json(self) -> dict[str, Any]:
        """Returns everything as plain JSON."""
        config, costs, memory, parallel = self.config, self.costs, self.memory, self.config.training.parallel
        return {
            "overrides": dict(self.overrides),
            "gpus": self.gpus,
            "trainer": {"data": parallel.data, "tensor": parallel.tensor},
            "generators": {
                "replicas": config.generation.replicas,
                "tensor": self.generator_tensor,
                "groups_per_batch": config.generation.groups_per_batch,
            },
            "mode": config.pipeline.mode,
            "colocated": config.placement.colocated,
            "max_staleness": config.effective_max_staleness,
            "outcome": self.outcome and asdict(self.outcome),
            "weight_sync_seconds": costs and {"handover": costs.handover, "push": costs.push, "pause": costs.pause},
            "bottleneck": self.bottleneck,
            "gpu_hours_per_million_tokens": self.gpu_hours_per_million_tokens,
            "memory_bytes_per_gpu": memory and {"trainer": memory.trainer, "generator": memory.generator},
            "memory_shortage": memory and memory.sentence,
            "stored_bytes_per_day": self.upkeep and self.upkeep.bytes_per_day,
            "reason": self.reason,
        }


def explicit_values(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that a config's file would hold, as JSON."""
    return config.model_dump(mode="json", exclude_unset=True)


def override(base: RunConfig, overrides: Mapping[str, Any], machine: Machine) -> Candidate | None:
    """Returns `base` with `overrides` and the memory it needs; None if the settings can't be combined."""
    values = copy.deepcopy(explicit_values(base))
    for key, value in overrides.items():
        put_key(values, key, value)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError:
        return None
    return make_candidate(config, overrides, machine)


def make_candidate(config: RunConfig, overrides: Mapping[str, Any], machine: Machine) -> Candidate:
    """Returns a candidate that has not been simulated yet."""
    memory = machine.memory(config)
    return Candidate(config=config, overrides=overrides, divides_gpus=machine.divides_gpus, memory=memory)


def simulate_candidate(candidate: Candidate, machine: Machine, simulate: Simulate) -> Candidate:
    """Adds the simulated outcome to a candidate. Raises InputError for a config that the machine can't judge."""
    config = candidate.config
    costs = machine.costs(config)
    outcome = simulate(config, costs, machine.lengths(config))
    return replace(candidate, costs=costs, outcome=outcome, upkeep=machine.upkeep(config, outcome.step_seconds))
