"""A plan: a config for a machine, with what it will do there, and what else was looked at.

make_plan  the best config on a machine, and why the others lost
what_if    a config as it is, and with changes
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from configs.schema import RunConfig
from configs.stored import put_key
from millrace.planning.costs.campaign import num_gpus
from millrace.planning.search.candidates import Candidate, differing, values_of
from millrace.planning.search.entry import Entry, Goal
from millrace.planning.search.machine import Assumption, Machine
from millrace.planning.search.search import Search, Simulate

_DIGITS = 4
_HANG_FACTOR = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What `millrace plan` answers."""

    base: RunConfig
    """The given config."""
    machine: str
    gpus: int | None
    """That there are; None on a machine whose GPUs are not divided."""
    goal: Goal
    entries: Sequence[Entry]
    """The winner first, then the runners-up; of a what-if, the config as it is, then the changed one."""
    simulated: Sequence[Entry]
    """All that were simulated, for the chart."""
    looked_at: int
    """Layouts that were looked at."""
    assumptions: Sequence[Assumption]
    dollars_per_gpu_hour: float | None = None

    @property
    def is_what_if(self) -> bool:
        """Whether two configs are compared, rather than the best one searched."""
        return self.looked_at == 0

    @property
    def chosen(self) -> Entry:
        """The winner; of a what-if, the changed config."""
        return self.entries[1] if self.is_what_if else self.entries[0]

    def config(self) -> RunConfig:
        """The chosen config, with what was predicted of it."""
        chosen = self.chosen
        values = values_of(chosen.candidate.config)
        if chosen.outcome is not None:
            for key, value in predicted(chosen).items():
                put_key(values, key, value)
        return RunConfig.model_validate(values)

    def changes(self, entry: Entry) -> dict[str, Any]:
        """Dotted key → value, of what an entry's config changes in the given one, prediction included."""
        return differing(self.base, {**entry.candidate.overrides, **predicted(entry)})

    def dollars(self, entry: Entry, seconds: float) -> float | None:
        """What an entry's GPUs cost in so many seconds."""
        if self.dollars_per_gpu_hour is None or entry.gpus is None:
            return None
        return entry.gpus * self.dollars_per_gpu_hour * seconds / 3600

    def to_json(self) -> dict[str, Any]:
        """Everything, plain JSON."""
        return {
            "config": self.base.name,
            "machine": self.machine,
            "gpus": self.gpus,
            "goal": self.goal,
            "what_if": self.is_what_if,
            "layouts_looked_at": self.looked_at,
            "dollars_per_gpu_hour": self.dollars_per_gpu_hour,
            "changes": self.changes(self.chosen),
            "entries": [entry.to_json() for entry in self.entries],
            "simulated": [entry.to_json() for entry in self.simulated],
            "assumptions": [asdict(one) for one in self.assumptions],
        }


def predicted(entry: Entry) -> dict[str, Any]:
    """What a config with this plan says besides: the prediction, and a time after which a stage counts as hung."""
    outcome, config = entry.outcome, entry.candidate.config
    if outcome is None:
        return {}
    found: dict[str, Any] = {
        "plan.step_seconds": _short(outcome.step_seconds),
        "plan.tokens_per_second": _short(outcome.tokens_per_second),
        "plan.staleness_mean": _short(outcome.staleness_mean),
        "plan.dropped_share": _short(outcome.dropped_share),
    }
    # A step without a heartbeat for so long would be taken for a hang.
    if config.supervision.hang_seconds < _HANG_FACTOR * outcome.step_seconds:
        found["supervision.hang_seconds"] = float(round(_HANG_FACTOR * outcome.step_seconds))
    return found


def make_plan(
    config: RunConfig,
    machine: Machine,
    simulating: Simulate,
    *,
    gpus: int | None,
    goal: Goal,
    roughly: Simulate | None = None,
    batches: Sequence[int] = (),
    dollars_per_gpu_hour: float | None = None,
) -> Plan:
    """Searches. `roughly`: a quicker simulation to choose among many, if there is one.

    Raises InputError if nothing fits, with what is missing and by how much.
    """
    search = Search(config, machine, gpus=gpus, goal=goal, simulating=simulating, roughly=roughly or simulating)
    found = search.run(batches)
    return Plan(
        base=config,
        machine=machine.name,
        gpus=gpus,
        goal=goal,
        entries=[found.winner, *found.runners_up],
        simulated=found.simulated,
        looked_at=found.looked_at,
        assumptions=machine.assumptions(found.winner.candidate.config),
        dollars_per_gpu_hour=dollars_per_gpu_hour,
    )


def what_if(
    before: RunConfig,
    after: RunConfig,
    overrides: Mapping[str, Any],
    machine: Machine,
    simulating: Simulate,
    *,
    counts_gpus: bool,
    dollars_per_gpu_hour: float | None = None,
) -> Plan:
    """Both configs as they are; `overrides` are those of `after`. `counts_gpus`: whether the machine has some."""
    entries = [
        _entry(Candidate(config=config, overrides=changed), machine, simulating, counts_gpus=counts_gpus)
        for config, changed in ((before, {}), (after, overrides))
    ]
    return Plan(
        base=before,
        machine=machine.name,
        gpus=None,
        goal="fastest",
        entries=entries,
        simulated=entries,
        looked_at=0,
        assumptions=machine.assumptions(after),
        dollars_per_gpu_hour=dollars_per_gpu_hour,
    )


def _entry(candidate: Candidate, machine: Machine, simulating: Simulate, *, counts_gpus: bool) -> Entry:
    config = candidate.config
    memory = machine.memory(config)
    gpus = num_gpus(config) if counts_gpus else None
    if memory is not None and not memory.fits:
        reason = f"does not fit: {memory.sentence}"
        return Entry(candidate=candidate, gpus=gpus, outcome=None, memory=memory, reason=reason)
    costs = machine.costs(config)
    outcome = simulating(config, costs, machine.lengths(config))
    return Entry(
        candidate=candidate,
        gpus=gpus,
        outcome=outcome,
        costs=costs,
        memory=memory,
        storage=machine.storage(config, outcome.step_seconds),
    )


def _short(value: float) -> float:
    """To four significant digits, as a person reads it in the config."""
    return float(f"{value:.{_DIGITS}g}")
