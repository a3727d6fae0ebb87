"""A candidate with what is known of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from millrace.planning.costs.campaign import MemoryReport
from millrace.planning.costs.storage import StoredBytes
from millrace.planning.search.candidates import Candidate
from millrace.planning.search.verdicts import bottleneck
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.outcome import Outcome

Goal = Literal["fastest", "cheapest"]
GIB = 2**30


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A line of a plan."""

    candidate: Candidate
    gpus: int | None
    """That it uses; None on a machine whose GPUs are not divided."""
    outcome: Outcome | None
    """What it would do, simulated; None if it does not fit."""
    costs: Costs | None = None
    """Durations it was simulated with."""
    memory: MemoryReport | None = None
    storage: StoredBytes | None = None
    reason: str = ""
    """Why it lost, or what was looked at; empty for the winner."""

    @property
    def gpu_hours_per_million_tokens(self) -> float | None:
        """Of response tokens trained."""
        if self.outcome is None or self.gpus is None or not self.outcome.tokens_per_second:
            return None
        return self.gpus * 1e6 / self.outcome.tokens_per_second / 3600

    def score(self, goal: Goal) -> float:
        """Higher is better. Raises ValueError for an entry without an outcome."""
        if self.outcome is None:
            raise ValueError("nothing was simulated")
        rate = self.outcome.tokens_per_second
        return rate / self.gpus if goal == "cheapest" and self.gpus else rate

    @property
    def bottleneck(self) -> str | None:
        """In words; None without an outcome."""
        if self.outcome is None:
            return None
        push = 0.0 if self.costs is None else self.costs.push
        return bottleneck(self.outcome, sync=self.candidate.config.pipeline.mode == "sync", push=push)

    @property
    def trainer(self) -> str:
        """Its GPUs, data × tensor ranks."""
        parallel = self.candidate.config.training.parallel
        return f"{self.candidate.trainer_gpus} = {parallel.data} × TP{parallel.tensor}"

    @property
    def generators(self) -> str:
        """Their GPUs, replicas × GPUs of each; the number of replicas where GPUs are not divided."""
        candidate, replicas = self.candidate, self.candidate.config.generation.replicas
        return (
            str(replicas)
            if self.gpus is None
            else f"{candidate.generator_gpus} = {replicas} × TP{candidate.generator_tensor}"
        )

    @property
    def mode(self) -> str:
        """How stages are scheduled."""
        config = self.candidate.config
        if config.placement.colocated:
            return "sync, by turns"
        return "sync" if config.pipeline.mode == "sync" else f"async ≤ {config.effective_max_staleness}"

    def to_json(self) -> dict[str, Any]:
        """Everything, plain JSON."""
        config = self.candidate.config
        return {
            "overrides": dict(self.candidate.overrides),
            "gpus": self.gpus,
            "trainer": {"data": config.training.parallel.data, "tensor": config.training.parallel.tensor},
            "generators": {
                "replicas": config.generation.replicas,
                "tensor": self.candidate.generator_tensor,
                "groups_per_batch": config.generation.groups_per_batch,
            },
            "mode": config.pipeline.mode,
            "colocated": config.placement.colocated,
            "max_staleness": config.effective_max_staleness,
            "outcome": None if self.outcome is None else _plain(asdict(self.outcome)),
            "weight_sync_seconds": None
            if self.costs is None
            else {"handover": self.costs.handover, "push": self.costs.push, "pause": self.costs.pause},
            "bottleneck": self.bottleneck,
            "gpu_hours_per_million_tokens": self.gpu_hours_per_million_tokens,
            "memory_bytes_per_gpu": None
            if self.memory is None
            else {"trainer": self.memory.trainer.total, "generator": self.memory.generator.total},
            "memory_shortage": None if self.memory is None else self.memory.sentence,
            "stored_bytes_per_day": None if self.storage is None else self.storage.per_day,
            "reason": self.reason,
        }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
