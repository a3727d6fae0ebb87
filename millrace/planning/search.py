"""The best config on a machine, and why the others lose.

layouts: GPUs of the trainer (data × tensor) and of the generators (replicas × tensor), or both on the same
   │ memory fits? if not: activation checkpointing, smaller microbatches, fewer slots
   ▼ ranked by an analytic bound on their speed
the best few, with each bound and number of slots ─► simulated coarsely ─► the winner and one of each other
                                                                           kind, simulated with more steps
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.candidate import Candidate, Goal, Machine, Simulate, override, simulate_candidate
from millrace.planning.durations import Costs, Lengths, mean_lengths
from millrace.planning.simulation import Outcome, simulate

_ALIKE = 0.02
"""Candidates whose speeds differ by no more than this share are as good."""
_STALER = 0.05
"""Versions by which staleness must differ to be mentioned."""
_GENERATOR_TENSORS, _TRAINER_TENSORS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
_MOST_REPLICAS = 4
"""Generators on a machine whose GPUs are not divided."""
_EVEN = 4
"""A trainer of more GPUs than a host has takes a multiple of this, so that its hosts have equally many."""
_LEAST_RESPONSES = 4
"""Responses of the greatest length that a microbatch has room for."""
_SPLITS, _TUNED_LAYOUTS, _SHOWN_SPLITS = 12, 2, 3
"""Splits of each batch that are simulated, layouts that are with each bound and number of slots, and other splits that
are shown."""
_LEAST_STEPS = 6


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
    winner: Candidate
    runners_up: Sequence[Candidate]
    """Other ways to use the machine, each with why it lost, best first; then the nearest that does not fit."""
    simulated: Sequence[Candidate]
    """All that were simulated, best first."""
    num_layouts: int
    """Layouts that were considered, those that do not fit included."""


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
        layouts = [self._fit_memory(candidate) for candidate in self._layouts(batches)]
        if not layouts:
            expected = "at least 2, or a trainer and generators by turns on 1"
            raise InputError(f"no config divides {self._gpus} GPUs", expected=expected)
        fitting = [candidate for candidate in layouts if candidate.memory is None or candidate.memory.fits]
        nearest = min((layout for layout in layouts if layout not in fitting), key=_needed_bytes, default=None)
        shortage = nearest.memory.sentence if nearest and nearest.memory else ""
        if not fitting:
            assert nearest is not None
            raise InputError(
                f"{self._machine.name} does not fit {self._gpus} GPUs; the nearest split trains on {nearest.trainer} "
                f"and generates on {nearest.generators}, {nearest.mode}: {shortage}"
            )
        entries = self._simulate_all(self._best_splits(self._rank(fitting)))
        tuned = [entry for entry in entries if entry.config.pipeline.mode == "async"][:_TUNED_LAYOUTS]
        entries += self._simulate_all(schedule for layout in tuned for schedule in self._schedules(layout))
        entries.sort(key=self._sort_key)
        winner = self._choose(entries)
        shown = [simulate_candidate(entry, self._machine, self._fine) for entry in _one_of_each_kind(entries, winner)]
        winner = simulate_candidate(winner, self._machine, self._fine)
        runners_up = [
            replace(entry, reason=self._why_lost(entry, winner)) for entry in sorted(shown, key=self._sort_key)
        ]
        if nearest is not None:
            runners_up.append(replace(nearest, reason=f"does not fit: {shortage}"))
        return SearchResult(winner=winner, runners_up=runners_up, simulated=entries, num_layouts=len(layouts))

    def _sort_key(self, entry: Candidate) -> float:
        return -entry.score(self._goal)

    def _override(self, overrides: dict[str, Any]) -> Candidate | None:
        generation = self._config.generation
        if "max_num_seqs" in generation.engine_args:
            # An engine that is limited to a number of requests has as many as it has slots.
            slots = int(overrides["generation.groups_per_batch"]) * generation.group_size
            overrides = {**overrides, "generation.engine_args.max_num_seqs": slots}
        return override(self._config, overrides, self._machine)

    def _layouts(self, batches: Sequence[int]) -> Iterator[Candidate]:
        """Yields every split of the machine: asynchronous if the config is, synchronous, and by turns on all GPUs."""
        config = self._config
        for batch in dict.fromkeys((config.training.groups_per_step, *batches)):
            for split in self._splits(batch):
                turns = split["placement.colocated"]
                for mode in ("sync",) if turns else dict.fromkeys((config.pipeline.mode, "sync")):
                    overrides = {
                        "training.groups_per_step": batch,
                        "pipeline.mode": mode,
                        "generation.groups_per_batch": max(1, batch // split["generation.replicas"]),
                        **split,
                    }
                    if (candidate := self._override(overrides)) is not None:
                        yield candidate

    def _splits(self, batch: int) -> Iterator[dict[str, Any]]:
        if self._gpus is None:
            for replicas in range(1, _MOST_REPLICAS + 1):
                if batch % replicas == 0:
                    yield {"generation.replicas": replicas, "placement.colocated": False}
            return
        for tensor in filter(self._machine.allows_generator_tensor, _GENERATOR_TENSORS):
            for replicas in range(1, min(batch, self._gpus // tensor) + 1):
                if batch % replicas == 0:
                    left = self._gpus - replicas * tensor
                    # A trainer on a half or a quarter of the other GPUs may be cheaper.
                    for gpus in dict.fromkeys((left, left // 2, left // 4) if left else (self._gpus,)):
                        yield from self._trainer_layouts(replicas, tensor, gpus, turns=not left)

    def _trainer_layouts(self, replicas: int, tensor: int, gpus: int, *, turns: bool) -> Iterator[dict[str, Any]]:
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

    def _fit_memory(self, candidate: Candidate) -> Candidate:
        """Applies activation checkpointing, smaller microbatches and fewer slots until it fits or nothing is left."""
        while candidate.memory is not None and not candidate.memory.fits:
            training, slots = candidate.config.training, candidate.config.generation.groups_per_batch // 2
            tokens = training.max_tokens_per_microbatch // 2
            smaller: dict[str, Any] = {}
            if candidate.memory.trainer_fits:
                smaller = {"generation.groups_per_batch": slots} if slots else {}
            elif not training.activation_checkpointing:
                smaller = {"training.activation_checkpointing": True}
            elif tokens >= _LEAST_RESPONSES * candidate.config.generation.max_new_tokens:
                smaller = {"training.max_tokens_per_microbatch": tokens}
            other = self._override({**candidate.overrides, **smaller}) if smaller else None
            if other is None:
                break
            candidate = other
        return candidate

    def _rank(self, layouts: Sequence[Candidate]) -> list[Candidate]:
        """Sorts layouts by the score that no schedule of them can exceed, but for the samples' chance.

        Layouts without figures are left out. Raises InputError if none has any.
        """
        bounds: list[tuple[float, Candidate]] = []
        error = None
        for layout in layouts:
            config = layout.config
            try:
                seconds = least_step_seconds(config, self._machine.costs(config), self._machine.lengths(config))
            except InputError as refused:
                error = refused
                continue
            gpus = layout.gpus if self._goal == "cheapest" else None
            bounds.append((config.training.groups_per_step / seconds / (gpus or 1), layout))
        if not bounds and error is not None:
            raise error
        return [layout for _, layout in sorted(bounds, key=lambda pair: -pair[0])]

    def _best_splits(self, layouts: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yields the best layout of each of the best splits of each batch, and the best whose stages wait."""
        count: Counter[tuple[object, ...]] = Counter()
        seen = set()
        for layout in layouts:
            config, waits = layout.config, layout.config.pipeline.mode == "sync"
            kind = (waits, config.placement.colocated if waits else config.training.groups_per_step)
            if (kind, layout.split) not in seen and count[kind] < (1 if waits else _SPLITS):
                seen.add((kind, layout.split))
                count[kind] += 1
                yield layout

    def _simulate_all(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Simulates coarsely. Returns the best first."""
        entries = [simulate_candidate(candidate, self._machine, self._coarse) for candidate in candidates]
        return sorted(entries, key=self._sort_key)

    def _schedules(self, layout: Candidate) -> Iterator[Candidate]:
        """Yields a layout with other staleness bounds, and numbers of slots per generator that the bound can fill."""
        most, config = self._config.staleness.max_staleness, layout.config
        share = max(1, config.training.groups_per_step // config.generation.replicas)
        for bound in sorted({bound for bound in (1, 2, 4, 8, 16) if bound < most} | {most}, reverse=True):
            seen = {config.generation.groups_per_batch} if config.staleness.max_staleness == bound else set()
            for factor in sorted({factor for factor in (0.5, 1, 2) if factor <= bound + 1} | {bound + 1}):
                schedule = {
                    "staleness.max_staleness": bound,
                    "generation.groups_per_batch": max(1, round(share * factor)),
                }
                candidate = self._override({**layout.overrides, **schedule})
                if candidate is None:
                    continue
                candidate = self._fit_memory(candidate)
                slots = candidate.config.generation.groups_per_batch
                if (candidate.memory is None or candidate.memory.fits) and slots not in seen:
                    seen.add(slots)
                    yield candidate

    def _choose(self, entries: Sequence[Candidate]) -> Candidate:
        """Returns the best; of those that are as good, the one with the least staleness, GPUs, bound and slots."""

        def freshness(entry: Candidate) -> tuple[float, ...]:
            assert entry.outcome is not None
            config = entry.config
            slots = config.generation.replicas * config.generation.groups_per_batch
            return round(entry.outcome.staleness_mean, 1), entry.gpus or 0, config.effective_max_staleness, slots

        best = max(entry.score(self._goal) for entry in entries)
        return min((entry for entry in entries if entry.score(self._goal) >= (1 - _ALIKE) * best), key=freshness)

    def _why_lost(self, entry: Candidate, winner: Candidate) -> str:
        assert entry.outcome is not None
        assert winner.outcome is not None
        batch, ratio = entry.config.training.groups_per_step, winner.score("fastest") / entry.score("fastest")
        if batch != winner.config.training.groups_per_step:
            reasons = [f"{batch} groups per step: {ratio:.2f} × the time per token"]
        elif abs(ratio - 1) <= _ALIKE:
            reasons = ["as fast"]
        else:
            reasons = [f"{ratio:.2f} × slower" if ratio > 1 else f"{1 / ratio:.2f} × faster"]
        share = winner.score(self._goal) / entry.score(self._goal)
        if self._goal == "cheapest" and entry.gpus and winner.gpus:
            reasons.append(f"{share:.2f} × the GPU-hours per token")
        if share <= 1 / (1 - _ALIKE):
            if entry.outcome.staleness_mean > winner.outcome.staleness_mean + _STALER:
                staleness = f"{entry.outcome.staleness_mean:.2f}, not {winner.outcome.staleness_mean:.2f}"
                reasons.append(f"staler: {staleness}")
            elif (entry.gpus or 0) > (winner.gpus or 0):
                reasons.append(f"takes {entry.gpus} GPUs, not {winner.gpus}")
        return "; ".join([*reasons, entry.bottleneck or ""])


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
    generate += costs.prefill(round(share * means.prompt)) + costs.pause
    if is_sync:
        longest = means.longest * costs.decode(1, round(context))
        return train + max(generate, longest + costs.pause) + costs.push
    # After new weights the caches of all requests in flight are computed once more.
    generate += costs.prefill(round(running * context))
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
    config, best = entry.config, winner.config
    if config.training.groups_per_step != best.training.groups_per_step:
        return "batch", config.training.groups_per_step
    if config.pipeline.mode == "sync":
        return "sync", config.placement.colocated
    is_same = (entry.trainer, entry.generators) == (winner.trainer, winner.generators)
    if is_same and config.effective_max_staleness < best.effective_max_staleness:
        return ("lower bound",)
    return ("split", *entry.split)


def _needed_bytes(candidate: Candidate) -> float:
    assert candidate.memory is not None
    return max(candidate.memory.trainer, candidate.memory.generator)
