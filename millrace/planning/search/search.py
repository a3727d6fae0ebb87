"""The best config on a machine.

    layouts ─► memory fits? ─► analytic bound ─► best few ─► places and bounds ─► bound ─► simulate ─► winner
                  └─► by how much not                                                        └─► runners-up, and why

The simulation costs some tenths of a second, the bound microseconds; so a few dozen of the thousands are simulated.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.costs.campaign import MemoryReport, num_gpus
from millrace.planning.search.bounds import least_step_seconds, work_of
from millrace.planning.search.candidates import (
    Candidate,
    bounds_up_to,
    changed,
    layouts,
    schedules,
    smaller_generator,
    smaller_trainer,
    values_of,
)
from millrace.planning.search.choice import choose, lost, others_of
from millrace.planning.search.entry import GIB, Entry, Goal
from millrace.planning.search.machine import Machine
from millrace.planning.search.verdicts import ALIKE
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import Lengths
from millrace.planning.simulation.outcome import Outcome
from millrace.planning.simulation.simulate import simulate

_LAYOUTS, _SYNC_LAYOUTS, _SPLITS, _SIMULATED = 6, 1, 8, 14
_ROUGH_STEPS = 12

Simulate = Callable[[RunConfig, Costs, Lengths], Outcome]


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What a search found."""

    winner: Entry
    runners_up: Sequence[Entry]
    """Other ways to use the machine, each with why it lost, best first; then those that do not fit or may not be."""
    simulated: Sequence[Entry]
    """All that were simulated, best first."""
    looked_at: int
    """Layouts, those that do not fit included."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fitting:
    candidate: Candidate
    memory: MemoryReport | None
    costs: Costs
    score: float
    """By the analytic bound; higher is better."""


class Search:
    """A search for one config on one machine with `gpus` GPUs, None if they are not divided.

    `simulating` runs a config in simulated time; `roughly` does with fewer steps, to choose among many.
    """

    def __init__(
        self,
        config: RunConfig,
        machine: Machine,
        *,
        gpus: int | None,
        goal: Goal,
        simulating: Simulate,
        roughly: Simulate,
    ) -> None:
        self._config = config
        self._machine = machine
        self._gpus = gpus
        self._goal: Goal = goal
        self._simulate = simulating
        self._roughly = roughly
        self._work = work_of(machine.lengths(config))

    def run(self, batches: Sequence[int] = ()) -> Found:
        """Searches. `batches`: values of training.groups_per_step to try besides the config's.

        Raises InputError, with what is missing and by how much, if nothing fits.
        """
        all_layouts = list(layouts(self._config, self._machine, self._gpus, batches))
        if not all_layouts:
            raise InputError(
                f"no config divides {self._gpus} GPUs: expected at least 2, or a trainer and generators by turns on 1"
            )
        fitting, unfit = self._fitting(all_layouts)
        if not fitting:
            raise InputError(self._nothing_fits(unfit))
        chosen = self._best_of(fitting)
        entries = [self._entry(one) for one in chosen]
        entries += self._around(choose(entries, self._goal))
        entries.sort(key=lambda entry: -entry.score(self._goal))
        winner = choose(entries, self._goal)
        others = [self._precisely(entry) for entry in others_of(entries, winner)]
        winner = self._precisely(winner)
        others = sorted((lost(entry, winner, self._goal) for entry in others), key=lambda one: -one.score(self._goal))
        return Found(
            winner=winner,
            runners_up=[*others, *self._staler(winner), *self._short(unfit)],
            simulated=entries,
            looked_at=len(all_layouts),
        )

    def _fitting(self, candidates: Iterable[Candidate]) -> tuple[list[_Fitting], list[tuple[Candidate, MemoryReport]]]:
        """Those that fit, perhaps with fewer places or with activation checkpointing, best first; and the others."""
        fitting, unfit = [], []
        for candidate in candidates:
            tried, memory = self._made_to_fit(candidate)
            if memory is None or memory.fits:
                fitting.append(self._judged(tried, memory))
            else:
                unfit.append((tried, memory))
        return sorted(fitting, key=lambda one: -one.score), unfit

    def _made_to_fit(self, candidate: Candidate) -> tuple[Candidate, MemoryReport | None]:
        memory = self._machine.memory(candidate.config)
        while memory is not None and not memory.fits:
            smaller = smaller_trainer if not memory.trainer_fits else smaller_generator
            other = smaller(self._config, candidate)
            if other is None:
                break
            candidate, memory = other, self._machine.memory(other.config)
        return candidate, memory

    def _judged(self, candidate: Candidate, memory: MemoryReport | None) -> _Fitting:
        costs = self._machine.costs(candidate.config)
        seconds = least_step_seconds(candidate.config, costs, self._work)
        rate = candidate.config.training.groups_per_step / seconds
        gpus = candidate.gpus if self._gpus is not None and self._goal == "cheapest" else 1
        return _Fitting(candidate=candidate, memory=memory, costs=costs, score=rate / gpus)

    def _best_of(self, fitting: Sequence[_Fitting]) -> list[_Fitting]:
        """What is worth a simulation: schedules of the best layouts of each batch, and the best that wait."""
        by_batch: dict[int, list[_Fitting]] = {}
        for one in fitting:
            by_batch.setdefault(one.candidate.config.training.groups_per_step, []).append(one)
        bounds = bounds_up_to(self._config.staleness.max_staleness)
        chosen: list[_Fitting] = []
        for some in by_batch.values():
            free = [one for one in some if one.candidate.config.pipeline.mode == "async"]
            schedule = (
                candidate
                for one in free[: -(-_LAYOUTS // len(by_batch))]
                for candidate in schedules(self._config, one.candidate, bounds)
            )
            chosen += _one_of_each(self._fitting(schedule)[0], -(-_SIMULATED // len(by_batch)))
            # Other splits, for the picture.
            splits: dict[tuple[int, int], _Fitting] = {}
            for one in free:
                splits.setdefault((one.candidate.trainer_gpus, one.candidate.generator_tensor), one)
            known = {(one.candidate.trainer_gpus, one.candidate.generator_tensor) for one in chosen}
            chosen += [one for split, one in splits.items() if split not in known][:_SPLITS]
        for turns in (False, True):
            sync = [one for one in fitting if one.candidate.config.pipeline.mode == "sync"]
            chosen += [one for one in sync if one.candidate.config.placement.colocated is turns][:_SYNC_LAYOUTS]
        return chosen

    def _around(self, entry: Entry) -> list[Entry]:
        """The same layout with each lower bound, and with each other number of places, as far as they fit."""
        config = entry.candidate.config
        bound, places = config.staleness.max_staleness, config.generation.groups_per_batch
        near = [
            one
            for one in schedules(self._config, entry.candidate, bounds_up_to(bound))
            if (one.config.staleness.max_staleness == bound) != (one.config.generation.groups_per_batch == places)
        ]
        fitting, _ = self._fitting(near)
        return [self._entry(one) for one in fitting]

    def _entry(self, one: _Fitting) -> Entry:
        config = one.candidate.config
        outcome = self._roughly(config, one.costs, self._machine.lengths(config))
        return Entry(
            candidate=one.candidate,
            gpus=None if self._gpus is None else num_gpus(config),
            outcome=outcome,
            costs=one.costs,
            memory=one.memory,
            storage=self._machine.storage(config, outcome.step_seconds),
        )

    def _precisely(self, entry: Entry) -> Entry:
        """Simulated with as many steps as were asked for."""
        assert entry.costs is not None
        config = entry.candidate.config
        outcome = self._simulate(config, entry.costs, self._machine.lengths(config))
        return replace(entry, outcome=outcome, storage=self._machine.storage(config, outcome.step_seconds))

    def _staler(self, winner: Entry) -> list[Entry]:
        """The winner with twice the bound that was asked for, as far as it would be faster."""
        config = winner.candidate.config
        if config.pipeline.mode == "sync":
            return []
        asked = self._config.staleness.max_staleness
        bound = max(1, 2 * asked)
        other = changed(values_of(self._config), {**winner.candidate.overrides, "staleness.max_staleness": bound})
        if other is None:
            return []
        entry = self._entry(self._judged(other, self._machine.memory(other.config)))
        if entry.score(self._goal) <= (1 + ALIKE) * winner.score(self._goal):
            return []
        assert entry.outcome is not None
        reason = f"staleness up to {bound}, {asked} asked for: a step would take {entry.outcome.step_seconds:.4g} s"
        return [replace(entry, reason=reason)]

    def _short(self, unfit: Sequence[tuple[Candidate, MemoryReport]]) -> list[Entry]:
        """Of what does not fit, the layout that lacks least."""
        nearest = sorted(unfit, key=lambda one: _excess(one[1]))[:1]
        return [
            Entry(
                candidate=candidate,
                gpus=num_gpus(candidate.config),
                outcome=None,
                memory=memory,
                reason=f"does not fit: {memory.sentence}",
            )
            for candidate, memory in nearest
        ]

    def _nothing_fits(self, unfit: Sequence[tuple[Candidate, MemoryReport]]) -> str:
        candidate, memory = min(unfit, key=lambda one: _excess(one[1]))
        nearest = Entry(candidate=candidate, gpus=candidate.gpus, outcome=None)
        return (
            f"{self._machine.name} does not fit {self._gpus} GPUs; the nearest split trains on {nearest.trainer} and "
            f"generates on {nearest.generators}, {nearest.mode}: {memory.sentence}"
        )


def simulating(steps: int, most_rollouts: int | None = None) -> Simulate:
    """Simulates so many steps after a warm-up that fills the pipeline.

    With `most_rollouts`, as many as it takes to train so many, but at least some: large batches vary less.
    """

    def run(config: RunConfig, costs: Costs, lengths: Lengths) -> Outcome:
        rollouts = config.training.groups_per_step * config.generation.group_size
        wanted = steps if most_rollouts is None else min(steps, max(_ROUGH_STEPS, most_rollouts // rollouts))
        warmup = 2 * (config.effective_max_staleness + 1) + 2
        return simulate(config, costs, lengths, steps=warmup + wanted, warmup=warmup)

    return run


def _one_of_each(fitting: Sequence[_Fitting], most: int) -> list[_Fitting]:
    """The best schedule of each layout and bound, best first."""
    found: dict[tuple[object, ...], _Fitting] = {}
    for one in fitting:
        found.setdefault((*one.candidate.layout, one.candidate.config.effective_max_staleness), one)
    return list(found.values())[:most]


def _excess(memory: MemoryReport) -> float:
    return max(memory.trainer.total, memory.generator.total) / GIB
