"""The best config on a machine, and why the others lose.

layouts: GPUs of the trainer (data × tensor) and of the generators (replicas × tensor), or both on the same
   │ memory fits? if not: activation checkpointing, smaller microbatches, fewer places
   ▼ ranked by an analytic bound on their speed
the best few, with each bound and number of places ─► simulated coarsely ─► the winner and one of each other
                                                                           kind, simulated with more steps
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.candidate import Candidate, Goal, Machine, changed
from millrace.planning.durations import Costs, Lengths, mean_lengths
from millrace.planning.simulation import Outcome, simulate

ALIKE = 0.02
"""Candidates whose speeds differ by no more than this share are as good."""
_STALER = 0.05
"""Versions by which staleness must differ to be mentioned."""
_GENERATOR_TENSORS, _TRAINER_TENSORS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
_MOST_REPLICAS = 4
"""Generators on a machine whose GPUs are not divided."""
_EVEN = 4
"""A trainer of more GPUs than a host has takes a multiple of this, so that its hosts have equally many."""
_LEAST_RESPONSES = 4
"""Of the greatest length, that a microbatch has room for."""
_LAYOUTS, _SPLITS, _TUNED_LAYOUTS, _SHOWN_SPLITS = 4, 8, 2, 3
"""Layouts that are simulated, other splits that are, layouts that are with each bound and number of places, and other
splits that are shown."""
_LEAST_STEPS = 6

Simulate = Callable[[RunConfig, Costs, Lengths], Outcome]


def simulator(steps: int, most_rollouts: int | None = None) -> Simulate:
    """Returns a function that simulates `steps` steps after a warm-up that fills the pipeline.

    With `most_rollouts` it simulates fewer, but at least six: large batches vary less.
    """

    def run(config: RunConfig, costs: Costs, lengths: Lengths) -> Outcome:
        rollouts = config.training.groups_per_step * config.generation.group_size
        counted = steps if most_rollouts is None else min(steps, max(_LEAST_STEPS, most_rollouts // rollouts))
        warmup = 2 * (config.effective_max_staleness + 1) + 2
        return simulate(config, costs, lengths, steps=warmup + counted, warmup=warmup)

    return run


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchResult:
    """The result of a search."""

    winner: Candidate
    runners_up: Sequence[Candidate]
    """Other ways to use the machine, each with why it lost, best first; then those that do not fit or may not be."""
    simulated: Sequence[Candidate]
    """All that were simulated, best first."""
    num_layouts: int
    """Those that do not fit included."""


def simulated(candidate: Candidate, machine: Machine, simulate: Simulate) -> Candidate:
    """Adds the simulated outcome to a candidate. Raises InputError for a config that the machine can't judge."""
    config = candidate.config
    costs = machine.costs(config)
    outcome = simulate(config, costs, machine.lengths(config))
    return replace(
        candidate,
        costs=costs,
        outcome=outcome,
        storage=machine.storage(config, outcome.step_seconds),
        failures=machine.failures(config, outcome.step_seconds),
    )


class Search:
    """A search for one config on one machine with `gpus` GPUs, None if they are not divided.

    `coarse` chooses among many candidates, `fine` is for those that are shown.
    """

    def __init__(
        self, config: RunConfig, machine: Machine, *, gpus: int | None, goal: Goal, fine: Simulate, coarse: Simulate
    ) -> None:
        self._config, self._machine, self._gpus = config, machine, gpus
        self._goal: Goal = goal
        self._fine, self._coarse = fine, coarse

    def run(self, batches: Sequence[int] = ()) -> SearchResult:
        """Searches. `batches`: values of training.groups_per_step to try in addition to the config's.

        Raises InputError, with the missing GiB, if nothing fits.
        """
        layouts = [self._made_to_fit(candidate) for candidate in self._layouts(batches)]
        if not layouts:
            raise InputError(
                f"no config divides {self._gpus} GPUs: expected at least 2, or a trainer and generators by turns on 1"
            )
        fitting = [candidate for candidate in layouts if candidate.memory is None or candidate.memory.fits]
        nearest = min((layout for layout in layouts if layout not in fitting), key=_needed, default=None)
        if not fitting:
            assert nearest is not None
            assert nearest.memory is not None
            raise InputError(
                f"{self._machine.name} does not fit {self._gpus} GPUs; the nearest split trains on {nearest.trainer} "
                f"and generates on {nearest.generators}, {nearest.mode}: {nearest.memory.sentence}"
            )
        fitting.sort(key=lambda candidate: -self._bound(candidate))
        entries = self._simulated(self._best_layouts(fitting))
        tuned = [entry for entry in entries if entry.config.pipeline.mode == "async"][:_TUNED_LAYOUTS]
        entries += self._simulated([schedule for layout in tuned for schedule in self._schedules(layout)])
        entries.sort(key=lambda entry: -entry.score(self._goal))
        winner = self._choose(entries)
        shown = [simulated(entry, self._machine, self._fine) for entry in _one_of_each_kind(entries, winner)]
        winner = simulated(winner, self._machine, self._fine)
        shown.sort(key=lambda entry: -entry.score(self._goal))
        runners_up = [replace(entry, reason=self._why_lost(entry, winner)) for entry in shown]
        runners_up += self._staler(winner)
        if nearest is not None and nearest.memory is not None:
            runners_up.append(replace(nearest, reason=f"does not fit: {nearest.memory.sentence}"))
        return SearchResult(winner=winner, runners_up=runners_up, simulated=entries, num_layouts=len(layouts))

    def _changed(self, overrides: dict[str, Any]) -> Candidate | None:
        generation = self._config.generation
        if "max_num_seqs" in generation.engine_args:
            # An engine that is limited to a number of requests has as many as it has places.
            places = int(overrides["generation.groups_per_batch"]) * generation.group_size
            overrides = {**overrides, "generation.engine_args.max_num_seqs": places}
        return changed(self._config, overrides, self._machine, divides_gpus=self._gpus is not None)

    def _layouts(self, batches: Sequence[int]) -> Iterator[Candidate]:
        """Every split of the machine: asynchronous if the config is, synchronous, and by turns on the same GPUs."""
        config = self._config
        for batch in dict.fromkeys((config.training.groups_per_step, *batches)):
            for split in self._splits(batch):
                turns = bool(split.get("placement.colocated"))
                for mode in ("sync",) if turns else dict.fromkeys((config.pipeline.mode, "sync")):
                    overrides = {
                        "training.groups_per_step": batch,
                        "pipeline.mode": mode,
                        "generation.groups_per_batch": max(1, batch // split["generation.replicas"]),
                        "placement.colocated": turns,
                        **split,
                    }
                    if (candidate := self._changed(overrides)) is not None:
                        yield candidate

    def _splits(self, batch: int) -> Iterator[dict[str, Any]]:
        if self._gpus is None:
            for replicas in range(1, _MOST_REPLICAS + 1):
                if batch % replicas == 0:
                    yield {"generation.replicas": replicas}
            return
        for tensor in filter(self._machine.allows_generator_tensor, _GENERATOR_TENSORS):
            for replicas in range(1, min(batch, self._gpus // tensor) + 1):
                if batch % replicas == 0:
                    left = self._gpus - replicas * tensor
                    # A trainer on a half or a quarter of what is left may be cheaper.
                    for gpus in dict.fromkeys((left, left // 2, left // 4) if left else (self._gpus,)):
                        yield from self._split(replicas, tensor, gpus, turns=not left)

    def _split(self, replicas: int, tensor: int, trainer_gpus: int, *, turns: bool) -> Iterator[dict[str, Any]]:
        gpus = trainer_gpus
        if gpus > 2 * _EVEN and not turns:
            gpus -= gpus % _EVEN
        for ranks in filter(self._machine.allows_trainer_tensor, _TRAINER_TENSORS):
            if gpus >= ranks and gpus % ranks == 0:
                yield {
                    "training.device": "cuda",
                    "generation.engine": "vllm",
                    "training.parallel.data": gpus // ranks,
                    "training.parallel.tensor": ranks,
                    "generation.replicas": replicas,
                    "generation.engine_args.tensor_parallel_size": tensor,
                    "placement.colocated": turns,
                }

    def _made_to_fit(self, candidate: Candidate) -> Candidate:
        """Applies activation checkpointing, smaller microbatches and fewer places until it fits or nothing is left."""
        while candidate.memory is not None and not candidate.memory.fits:
            training, places = candidate.config.training, candidate.config.generation.groups_per_batch // 2
            tokens = training.max_tokens_per_microbatch // 2
            if candidate.memory.trainer_fits:
                smaller: dict[str, Any] = {"generation.groups_per_batch": places} if places else {}
            elif not training.activation_checkpointing:
                smaller = {"training.activation_checkpointing": True}
            elif tokens >= _LEAST_RESPONSES * candidate.config.generation.max_new_tokens:
                smaller = {"training.max_tokens_per_microbatch": tokens}
            else:
                smaller = {}
            other = self._changed({**candidate.overrides, **smaller}) if smaller else None
            if other is None:
                break
            candidate = other
        return candidate

    def _bound(self, candidate: Candidate) -> float:
        """The score that no schedule of this candidate can exceed, but for the samples' chance."""
        config = candidate.config
        seconds = least_step_seconds(config, self._machine.costs(config), self._machine.lengths(config))
        gpus = candidate.gpus if self._goal == "cheapest" else None
        return config.training.groups_per_step / seconds / (gpus or 1)

    def _simulated(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Coarsely, best first."""
        entries = [simulated(candidate, self._machine, self._coarse) for candidate in candidates]
        return sorted(entries, key=lambda entry: -entry.score(self._goal))

    def _best_layouts(self, fitting: Sequence[Candidate]) -> list[Candidate]:
        """The best layouts of each batch, the best of other splits, and the best that wait."""
        chosen: list[Candidate] = []
        overlapping = [layout for layout in fitting if layout.config.pipeline.mode == "async"]
        for batch in dict.fromkeys(layout.config.training.groups_per_step for layout in overlapping):
            layouts = [layout for layout in overlapping if layout.config.training.groups_per_step == batch]
            chosen += layouts[:_LAYOUTS]
            # Other splits, for the picture.
            splits: dict[tuple[int, int], Candidate] = {}
            for layout in layouts:
                splits.setdefault((layout.trainer_gpus, layout.generator_tensor), layout)
            chosen += [layout for layout in splits.values() if layout not in layouts[:_LAYOUTS]][:_SPLITS]
        for turns in (False, True):
            waiting = (layout for layout in fitting if layout.config.pipeline.mode == "sync")
            chosen += [layout for layout in waiting if layout.config.placement.colocated is turns][:1]
        return chosen

    def _schedules(self, layout: Candidate) -> Iterator[Candidate]:
        """A layout with each other staleness bound, and numbers of places per generator that the bound can fill."""
        most, config = self._config.staleness.max_staleness, layout.config
        share = max(1, config.training.groups_per_step // config.generation.replicas)
        for bound in sorted({bound for bound in (1, 2, 4, 8, 16) if bound < most} | {most}, reverse=True):
            factors = dict.fromkeys(factor for factor in (0.5, 1, 2, bound + 1) if factor <= bound + 1)
            seen = {config.generation.groups_per_batch} if config.staleness.max_staleness == bound else set()
            for factor in factors:
                schedule = {
                    "staleness.max_staleness": bound,
                    "generation.groups_per_batch": max(1, round(share * factor)),
                }
                candidate = self._changed({**layout.overrides, **schedule})
                if candidate is None:
                    continue
                candidate = self._made_to_fit(candidate)
                places = candidate.config.generation.groups_per_batch
                if (candidate.memory is None or candidate.memory.fits) and places not in seen:
                    seen.add(places)
                    yield candidate

    def _choose(self, entries: Sequence[Candidate]) -> Candidate:
        """The best; of those that are as good, the one with the least staleness, GPUs, bound and places."""

        def freshness(entry: Candidate) -> tuple[float, ...]:
            assert entry.outcome is not None
            config = entry.config
            places = config.generation.replicas * config.generation.groups_per_batch
            return round(entry.outcome.staleness_mean, 1), entry.gpus or 0, config.effective_max_staleness, places

        best = max(entry.score(self._goal) for entry in entries)
        return min((entry for entry in entries if entry.score(self._goal) >= (1 - ALIKE) * best), key=freshness)

    def _why_lost(self, entry: Candidate, winner: Candidate) -> str:
        """Both are simulated."""
        assert entry.outcome is not None
        assert winner.outcome is not None
        batch = entry.config.training.groups_per_step
        if batch == winner.config.training.groups_per_step:
            said = [_compared(entry.outcome.step_seconds, winner.outcome.step_seconds)]
        else:
            ratio = winner.score("fastest") / entry.score("fastest")
            said = [f"{batch} groups per step: {ratio:.2f} × the time per token"]
        if self._goal == "cheapest" and entry.gpus and winner.gpus:
            said.append(f"{winner.score(self._goal) / entry.score(self._goal):.2f} × the GPU-hours per token")
        if entry.score(self._goal) >= (1 - ALIKE) * winner.score(self._goal):
            if entry.outcome.staleness_mean > winner.outcome.staleness_mean + _STALER:
                said.append(f"staler: {entry.outcome.staleness_mean:.2f}, not {winner.outcome.staleness_mean:.2f}")
            elif (entry.gpus or 0) > (winner.gpus or 0):
                said.append(f"takes {entry.gpus} GPUs, not {winner.gpus}")
        return "; ".join([*said, entry.bottleneck or ""])

    def _staler(self, winner: Candidate) -> list[Candidate]:
        """Returns the winner with twice the bound of the config, if it would be faster."""
        if winner.config.pipeline.mode == "sync":
            return []
        given = self._config.staleness.max_staleness
        bound = max(1, 2 * given)
        candidate = self._changed({**winner.overrides, "staleness.max_staleness": bound})
        if candidate is None:
            return []
        entry = simulated(candidate, self._machine, self._coarse)
        if entry.outcome is None or entry.score(self._goal) <= (1 + ALIKE) * winner.score(self._goal):
            return []
        seconds = entry.outcome.step_seconds
        return [replace(entry, reason=f"staleness up to {bound}, {given} asked for: a step would take {seconds:.4g} s")]


def least_step_seconds(config: RunConfig, costs: Costs, lengths: Lengths) -> float:
    """Returns the seconds per step that no schedule of this config can beat: the slower of training and generation.

    In sync mode both follow each other, and the longest response decodes to its end.
    """
    means, training, generation = mean_lengths(lengths), config.training, config.generation
    is_sync, bound = config.pipeline.mode == "sync", config.effective_max_staleness
    rollouts = training.groups_per_step * generation.group_size
    train = costs.train(round(rollouts * (means.prompt + means.response)), rollouts) + costs.handover + costs.overhead
    train += costs.checkpoint / training.checkpoint_every
    share = training.groups_per_step / generation.replicas
    admitted = share if is_sync else min(generation.groups_per_batch, share * (bound + 1))
    running = max(1, round(admitted * generation.group_size))
    context = means.prompt + means.running
    per_token = costs.decode(running, round(running * context))
    generate = share * generation.group_size * means.response * per_token / running
    if is_sync:
        generate = max(generate, means.longest * costs.decode(1, round(context)))
    else:
        # After new weights the caches of all requests in flight are computed once more.
        generate += costs.prefill(round(running * context))
    generate += costs.prefill(round(share * means.prompt)) + costs.pause
    if is_sync:
        return train + generate + costs.push
    # A generator may begin groups of at most bound + 1 steps before the next version has travelled to it.
    step = max(train, generate, (costs.push + costs.handover) / (bound + 1))
    if costs.cores is not None:
        step = max(step, (train * training.threads + generate * generation.replicas * generation.threads) / costs.cores)
    return step


def _one_of_each_kind(entries: Iterable[Candidate], winner: Candidate) -> list[Candidate]:
    """Selects from `entries`, which are sorted: the best few of other splits, the best of each other batch, the best
    whose stages wait for each other, on GPUs of their own and by turns, and the winner's layout with a lower bound."""
    kinds = {_kind(winner, winner): winner}
    for entry in entries:
        kinds.setdefault(_kind(entry, winner), entry)
    others = {kind: entry for kind, entry in kinds.items() if entry is not winner}
    splits = [entry for kind, entry in others.items() if kind[0] == "split"]
    return [*splits[:_SHOWN_SPLITS], *(entry for kind, entry in others.items() if kind[0] != "split")]


def _kind(entry: Candidate, winner: Candidate) -> tuple[object, ...]:
    config, bound = entry.config, winner.config.effective_max_staleness
    if config.training.groups_per_step != winner.config.training.groups_per_step:
        return "batch", config.training.groups_per_step
    if config.pipeline.mode == "sync":
        return "sync", config.placement.colocated
    if entry.layout == winner.layout and config.effective_max_staleness < bound:
        return ("lower bound",)
    if not entry.divides_gpus:
        return "split", config.generation.replicas
    return "split", entry.trainer_gpus, entry.generator_tensor


def _compared(step_seconds: float, winner_step_seconds: float) -> str:
    """How much slower than the winner, of the same batch."""
    ratio = step_seconds / winner_step_seconds
    if abs(ratio - 1) <= ALIKE:
        return "as fast"
    return f"{ratio:.2f} × slower" if ratio > 1 else f"{1 / ratio:.2f} × faster"


def _needed(candidate: Candidate) -> float:
    assert candidate.memory is not None
    return max(candidate.memory.trainer, candidate.memory.generator)
