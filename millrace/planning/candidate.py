"""A machine that a plan is for, and a config that the plan considers there, with its predicted figures."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from configs.schema import RunConfig
from configs.stored import put_key
from millrace.planning.durations import Costs, Lengths
from millrace.planning.gpus import GpuMachine, generator_gpus, num_gpus
from millrace.planning.memory import MemoryReport
from millrace.planning.simulation import Outcome
from millrace.planning.stored import StoredMachine
from millrace.planning.training import trainer_gpus
from millrace.runs.status import find_bottleneck

Goal = Literal["fastest", "cheapest"]
Simulate = Callable[[RunConfig, Costs, Lengths], Outcome]
Machine = GpuMachine | StoredMachine


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A config, its differences from the given one, and its predicted figures if it was simulated."""

    config: RunConfig
    overrides: Mapping[str, Any]
    """Dotted key → value."""
    memory: MemoryReport | None = None
    """Per GPU; None on the machine of a stored run, where all fitted and GPUs are not divided."""
    costs: Costs | None = None
    outcome: Outcome | None = None
    """None if it was not simulated, or does not fit."""
    reason: str = ""
    """Why it lost, or why it was considered; empty for the winner."""

    @property
    def gpus(self) -> int | None:
        """Number of GPUs that it uses; None if they are not divided."""
        return num_gpus(self.config) if self.memory else None

    @property
    def split(self) -> tuple[int, int]:
        """GPUs of the trainer and of one generator; where GPUs are not divided, 1 and the number of generators."""
        if self.memory is None:
            return 1, self.config.generation.replicas
        return trainer_gpus(self.config), generator_gpus(self.config)

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
    def bottleneck(self) -> str:
        """The bottleneck in a sentence, with idle shares; empty without an outcome."""
        if self.outcome is None or self.costs is None:
            return ""
        is_sync, seconds = self.config.pipeline.mode == "sync", self.outcome.step_seconds
        found = find_bottleneck(self.outcome.idle, sync=is_sync, step_seconds=seconds, push=self.costs.push)
        return (
            f"{found.sentence}; raise scoring.workers or scoring.replicas" if found.stage == "score" else found.sentence
        )

    @property
    def trainer(self) -> str:
        """The trainer's GPUs, data × tensor ranks."""
        parallel = self.config.training.parallel
        return f"{trainer_gpus(self.config)} = {parallel.data} × TP{parallel.tensor}"

    @property
    def generators(self) -> str:
        """The generators' GPUs, replicas × GPUs of each; the number of replicas where GPUs are not divided."""
        replicas, tensor = self.config.generation.replicas, generator_gpus(self.config)
        return f"{replicas * tensor} = {replicas} × TP{tensor}" if self.memory else str(replicas)

    @property
    def mode(self) -> str:
        """How stages are scheduled."""
        if self.config.placement.colocated:
            return "sync, by turns"
        return "sync" if self.config.pipeline.mode == "sync" else f"async ≤ {self.config.effective_max_staleness}"

    def to_json(self) -> dict[str, Any]:
        """Returns everything as plain JSON."""
        costs = self.costs
        return {
            "overrides": dict(self.overrides),
            "gpus": self.gpus,
            "trainer": self.trainer,
            "generators": self.generators,
            "mode": self.mode,
            "outcome": self.outcome and asdict(self.outcome),
            "weight_sync_seconds": costs and {"handover": costs.handover, "push": costs.push, "pause": costs.pause},
            "bottleneck": self.bottleneck,
            "gpu_hours_per_million_tokens": self.gpu_hours_per_million_tokens,
            "memory_bytes_per_gpu": self.memory and asdict(self.memory),
            "reason": self.reason,
        }


def explicit_values(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that a config's file would hold, as JSON."""
    return config.model_dump(mode="json", exclude_unset=True)


def override(base: RunConfig, overrides: Mapping[str, Any], machine: Machine) -> Candidate | None:
    """Returns `base` with `overrides` and the memory it needs; None if the settings can't be combined."""
    values = explicit_values(base)
    for key, value in overrides.items():
        put_key(values, key, value)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError:
        return None
    return make_candidate(config, overrides, machine)


def make_candidate(config: RunConfig, overrides: Mapping[str, Any], machine: Machine) -> Candidate:
    """Returns a candidate that has not been simulated yet."""
    return Candidate(config=config, overrides=overrides, memory=machine.memory(config))


def simulate_candidate(candidate: Candidate, machine: Machine, simulate: Simulate) -> Candidate:
    """Adds the simulated outcome to a candidate."""
    costs = machine.costs(candidate.config)
    outcome = simulate(candidate.config, costs, machine.lengths(candidate.config))
    return replace(candidate, costs=costs, outcome=outcome)
