"""A plan: a config for a machine, with its predicted figures, and the alternatives; or a comparison of two configs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import RunConfig
from configs.stored import put_key
from millrace.planning.candidate import (
    Candidate,
    Goal,
    Machine,
    Simulate,
    explicit_values,
    make_candidate,
    simulate_candidate,
)

_HANG_FACTOR = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The answer of `millrace plan`."""

    base: RunConfig
    """The given config."""
    machine: str
    gpus: int | None
    """GPUs of the machine; None if they are not divided."""
    goal: Goal
    entries: Sequence[Candidate]
    """The winner first, then the runners-up; of a what-if, the config as it is, then the changed one."""
    simulated: Sequence[Candidate]
    """All that were simulated, for the chart."""
    num_layouts: int
    """Layouts that were considered."""
    assumptions: Mapping[str, str]
    """By subject, each with its source."""
    dollars_per_gpu_hour: float | None = None

    @property
    def is_what_if(self) -> bool:
        """Whether two configs are compared, rather than the best one searched."""
        return self.num_layouts == 0

    @property
    def chosen(self) -> Candidate:
        """The winner; of a what-if, the changed config."""
        return self.entries[1] if self.is_what_if else self.entries[0]

    def config(self) -> RunConfig:
        """Returns the chosen config with its prediction."""
        values = explicit_values(self.chosen.config)
        for key, value in _hang_limit(self.chosen).items():
            put_key(values, key, value)
        return RunConfig.model_validate(values)

    def changes(self, entry: Candidate) -> dict[str, Any]:
        """Returns an entry's changes of the given config, as dotted key → value."""
        overrides = {**entry.overrides, **_hang_limit(entry)}
        return {key: value for key, value in overrides.items() if _read_key(self.base, key) != value}

    def dollars(self, entry: Candidate, seconds: float) -> float | None:
        """Returns the price of an entry's GPUs for this time."""
        if self.dollars_per_gpu_hour is None or entry.gpus is None:
            return None
        return entry.gpus * self.dollars_per_gpu_hour * seconds / 3600

    def to_json(self) -> dict[str, Any]:
        """Returns everything as plain JSON."""
        return {
            "config": self.base.name,
            "machine": self.machine,
            "gpus": self.gpus,
            "goal": self.goal,
            "what_if": self.is_what_if,
            "num_layouts": self.num_layouts,
            "dollars_per_gpu_hour": self.dollars_per_gpu_hour,
            "changes": self.changes(self.chosen),
            "entries": [entry.to_json() for entry in self.entries],
            "simulated": [entry.to_json() for entry in self.simulated],
            "assumptions": dict(self.assumptions),
        }


def _hang_limit(entry: Candidate) -> dict[str, Any]:
    """The setting that a plan adds to a config: a hang limit longer than its steps, which have no heartbeat."""
    outcome = entry.outcome
    if outcome is None or entry.config.supervision.hang_seconds >= _HANG_FACTOR * outcome.step_seconds:
        return {}
    return {"supervision.hang_seconds": float(round(_HANG_FACTOR * outcome.step_seconds))}


def _read_key(config: RunConfig, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def what_if(
    config: RunConfig,
    changed: RunConfig,
    overrides: Mapping[str, Any],
    machine: Machine,
    simulate: Simulate,
    *,
    dollars_per_gpu_hour: float | None = None,
) -> Plan:
    """Compares a config with a changed one; `overrides` are the changes."""
    entries = []
    for candidate in (make_candidate(config, {}, machine), make_candidate(changed, overrides, machine)):
        if candidate.memory is not None and not candidate.memory.fits:
            entries.append(replace(candidate, reason=f"does not fit: {candidate.memory.sentence}"))
        else:
            entries.append(simulate_candidate(candidate, machine, simulate))
    return Plan(
        base=config,
        machine=machine.name,
        gpus=None,
        goal="fastest",
        entries=entries,
        simulated=entries,
        num_layouts=0,
        assumptions=machine.assumptions(changed),
        dollars_per_gpu_hour=dollars_per_gpu_hour,
    )
