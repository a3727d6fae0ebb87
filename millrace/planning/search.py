"""The best config on a machine, and why the others lose.

layouts: GPUs of the trainer (data × tensor) and of the generators (replicas × tensor), or both on the same
   │ memory fits? if not: activation checkpointing, smaller microbatches, fewer slots
   ▼ ranked by an analytic bound on their speed
the best splits, and the best two layouts with each bound and number of slots ─► simulated ─► the winner, and the best
                                                                                  of each other batch and mode
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.candidate import Candidate, Goal, Machine, Simulate, override, simulate_candidate
from millrace.planning.durations import Costs, Lengths, max_group_size, max_new_tokens, mean_group_size
from millrace.planning.plan import Plan
from millrace.planning.simulation import Outcome, simulate

_ALIKE = 0.02
"""Candidates whose speeds differ by no more than this share are as good."""
_GENERATOR_TENSORS, _TRAINER_TENSORS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
_BOUNDS = (1, 2, 4, 8, 16)
_MOST_REPLICAS = 4
"""Generators on a machine whose GPUs are not divided."""
_EVEN = 4
"""A trainer of more GPUs than a host has takes a multiple of this, so that its hosts have equally many."""
_LEAST_RESPONSES = 4
"""Responses of the greatest length that a microbatch has room for."""
_SPLITS, _TUNED_LAYOUTS = 6, 2
"""Splits of each batch and mode that are simulated, and layouts that are with each bound and number of slots."""
_LEAST_STEPS = 6


def simulator(steps: int, most_rollouts: int | None = None) -> Simulate:
    """Returns a function that simulates `steps` steps after a warm-up that fills the pipeline.

    With `most_rollouts` it simulates fewer, but at least six: large batches vary less.
    """

    def run(config: RunConfig, costs: Costs, lengths: Lengths) -> Outcome:
        rollouts = round(config.training.groups_per_step * mean_group_size(config))
        counted = steps if most_rollouts is None else min(steps, max(_LEAST_STEPS, most_rollouts // rollouts))
        warmup = 2 * (config.effective_max_staleness + 1) + 2
        return simulate(config, costs, lengths, steps=warmup + counted, warmup=warmup)

    return run


def make_plan(
    config: RunConfig,
    machine: Machine,
    simulate: Simulate,
    *,
    gpus: int | None,
    goal: Goal,
    batches: Sequence[int] = (),
    dollars_per_gpu_hour: float | None = None,
) -> Plan:
    """Searches the best config on `gpus` GPUs, None if the machine does not divide them.

    `batches`: values of training.groups_per_step to try in addition to the config's. Raises InputError, with the
    missing GiB, if nothing fits.
    """
    search = _Search(config, machine, gpus, goal)
    layouts, num_layouts = search.rank_layouts(batches)
    entries = [simulate_candidate(layout, machine, simulate) for layout in _best_of_each_kind(layouts, _SPLITS)]
    entries.sort(key=search.loss)
    tuned = [entry for entry in entries if entry.config.pipeline.mode == "async"][:_TUNED_LAYOUTS]
    for candidate in (schedule for layout in tuned for schedule in search.schedules(layout)):
        if all(candidate.config != entry.config for entry in entries):
            entries.append(simulate_candidate(candidate, machine, simulate))
    entries.sort(key=search.loss)
    winner = _choose(entries, goal)
    losers = [entry for entry in entries if (entry.mode, entry.split) != (winner.mode, winner.split)]
    runners_up = [replace(entry, reason=_why_lost(entry, winner, goal)) for entry in _best_of_each_kind(losers, 1)]
    return Plan(
        base=config,
        machine=machine.name,
        gpus=gpus,
        goal=goal,
        entries=[winner, *runners_up],
        simulated=entries,
        num_layouts=num_layouts,
        assumptions=machine.assumptions(winner.config),
        dollars_per_gpu_hour=dollars_per_gpu_hour,
    )


class _Search:
    """Enumerates the configs of a search, with the memory that they need."""

    def __init__(self, config: RunConfig, machine: Machine, gpus: int | None, goal: Goal) -> None:
        self._config, self._machine, self._gpus = config, machine, gpus
        self._goal: Goal = goal

    def loss(self, entry: Candidate) -> float:
        """Returns the key by which simulated candidates are sorted, best first."""
        return -entry.score(self._goal)

    def rank_layouts(self, batches: Sequence[int]) -> tuple[list[Candidate], int]:
        """Returns the layouts that fit, sorted by the score that no schedule of them can exceed; and how many exist.

        Layouts that can't divide the model, or have no figures, are left out. Raises InputError if none remains.
        """
        ranked, short, refusal = [], [], None
        for overrides in self._layouts(batches):
            try:
                candidate = self._fitted(overrides)
                if candidate is not None and candidate.memory is not None and not candidate.memory.fits:
                    short.append((max(candidate.memory.trainer, candidate.memory.generator), candidate))
                elif candidate is not None:
                    ranked.append((self._highest_score(candidate), candidate))
            except InputError as error:
                refusal = error
        if not ranked and short:
            nearest = min(short, key=lambda pair: pair[0])[1]
            split = f"the nearest split trains on {nearest.trainer} and generates on {nearest.generators}"
            shortage = nearest.memory and nearest.memory.sentence
            raise InputError(f"{self._machine.name} does not fit {self._gpus} GPUs; {split}: {shortage}")
        if not ranked:
            expected = "at least 2, or a trainer and generators by turns on 1"
            raise refusal or InputError(f"no config divides {self._gpus} GPUs", expected=expected)
        ranked.sort(key=lambda pair: -pair[0])
        return [layout for _, layout in ranked], len(ranked) + len(short)

    def schedules(self, layout: Candidate) -> Iterator[Candidate]:
        """Yields a layout with staleness bounds, and numbers of slots per generator that the bound can fill."""
        most, config = self._config.staleness.max_staleness, layout.config
        share = max(1, config.training.groups_per_step // config.generation.replicas)
        for bound in sorted({*(bound for bound in _BOUNDS if bound < most), most}, reverse=True):
            for factor in sorted({*(factor for factor in (0.5, 1, 2) if factor <= bound + 1), bound + 1}):
                schedule = {
                    "staleness.max_staleness": bound,
                    "generation.groups_per_batch": max(1, round(share * factor)),
                }
                candidate = self._fitted({**layout.overrides, **schedule})
                if candidate is not None and (candidate.memory is None or candidate.memory.fits):
                    yield candidate

    def _layouts(self, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yields every split of the machine: asynchronous if the config is, synchronous, and by turns on all GPUs."""
        config = self._config
        for batch in dict.fromkeys((config.training.groups_per_step, *batches)):
            for split in self._splits(batch):
                modes = ("sync",) if split["placement.colocated"] else dict.fromkeys((config.pipeline.mode, "sync"))
                for mode in modes:
                    slots = max(1, batch // split["generation.replicas"])
                    sizes = {"training.groups_per_step": batch, "generation.groups_per_batch": slots}
                    yield {**sizes, "pipeline.mode": mode, **split}

    def _splits(self, batch: int) -> Iterator[dict[str, Any]]:
        if self._gpus is None:
            for replicas in range(1, _MOST_REPLICAS + 1):
                if batch % replicas == 0:
                    yield {"generation.replicas": replicas, "placement.colocated": False}
            return
        for tensor in _GENERATOR_TENSORS:
            for replicas in range(1, min(batch, self._gpus // tensor) + 1):
                if batch % replicas == 0:
                    left = self._gpus - replicas * tensor
                    # A trainer on a half or a quarter of the other GPUs may be cheaper.
                    for gpus in dict.fromkeys((left, left // 2, left // 4) if left else (self._gpus,)):
                        yield from _trainer_layouts(replicas, tensor, gpus, turns=not left)

    def _fitted(self, overrides: dict[str, Any]) -> Candidate | None:
        """Returns the candidate with activation checkpointing, smaller microbatches and fewer slots until it fits.

        The last of these if it never fits, None if the settings can't be combined.
        """
        generation = self._config.generation
        if "max_num_seqs" in generation.engine_args:
            # An engine that is limited to a number of requests has as many as it has slots.
            slots = int(overrides["generation.groups_per_batch"]) * max_group_size(self._config)
            overrides = {**overrides, "generation.engine_args.max_num_seqs": slots}
        candidate = override(self._config, overrides, self._machine)
        if candidate is None or candidate.memory is None or candidate.memory.fits:
            return candidate
        training, slots = candidate.config.training, candidate.config.generation.groups_per_batch // 2
        tokens = training.max_tokens_per_microbatch // 2
        if candidate.memory.trainer_fits:
            smaller: dict[str, Any] = {"generation.groups_per_batch": slots} if slots else {}
        elif training.activation_checkpointing is not True:
            more = True if training.activation_checkpointing else "selective"
            smaller = {"training.activation_checkpointing": more}
        else:
            fits_responses = tokens >= _LEAST_RESPONSES * max_new_tokens(self._config)
            smaller = {"training.max_tokens_per_microbatch": tokens} if fits_responses else {}
        return (self._fitted({**overrides, **smaller}) if smaller else None) or candidate

    def _highest_score(self, layout: Candidate) -> float:
        config = layout.config
        seconds = least_step_seconds(config, self._machine.costs(config), self._machine.lengths(config))
        return config.training.groups_per_step / seconds / ((layout.gpus if self._goal == "cheapest" else None) or 1)


def _trainer_layouts(replicas: int, tensor: int, gpus: int, *, turns: bool) -> Iterator[dict[str, Any]]:
    if gpus > 2 * _EVEN and not turns:
        gpus -= gpus % _EVEN
    for ranks in _TRAINER_TENSORS:
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


def _best_of_each_kind(candidates: Iterable[Candidate], most: int) -> list[Candidate]:
    """Selects from candidates, best first: up to `most` splits of each batch and mode."""
    count: Counter[tuple[object, ...]] = Counter()
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        kind = candidate.config.training.groups_per_step, candidate.mode
        if (kind, candidate.split) not in best and count[kind] < most:
            count[kind] += 1
            best[kind, candidate.split] = candidate
    return list(best.values())


def _choose(entries: Sequence[Candidate], goal: Goal) -> Candidate:
    """Returns the best; of those that are as good, the one with the least staleness, GPUs, bound and slots."""

    def freshness(entry: Candidate) -> tuple[float, ...]:
        assert entry.outcome is not None
        config = entry.config
        slots = config.generation.replicas * config.generation.groups_per_batch
        return round(entry.outcome.staleness_mean, 1), entry.gpus or 0, config.effective_max_staleness, slots

    best = max(entry.score(goal) for entry in entries)
    return min((entry for entry in entries if entry.score(goal) >= (1 - _ALIKE) * best), key=freshness)


def _why_lost(entry: Candidate, winner: Candidate, goal: Goal) -> str:
    ratio = winner.score(goal) / entry.score(goal)
    per_token = f"{ratio:.2f} × the {'time' if goal == 'fastest' else 'GPU-hours'} per token"
    reasons = ["as good" if ratio <= 1 / (1 - _ALIKE) else per_token, entry.bottleneck]
    if (batch := entry.config.training.groups_per_step) != winner.config.training.groups_per_step:
        reasons.insert(0, f"{batch} groups per step")
    return "; ".join(reasons)


def least_step_seconds(config: RunConfig, costs: Costs, lengths: Lengths) -> float:
    """Returns the seconds per step that no schedule of this config can beat: the slower of training and generation.

    In sync mode both follow each other.
    """
    means, training, generation = lengths.means, config.training, config.generation
    is_sync, bound = config.pipeline.mode == "sync", config.effective_max_staleness
    group_size = mean_group_size(config)
    rollouts = round(training.groups_per_step * group_size)
    train = costs.train(round(rollouts * (means.prompt + means.response)), rollouts) + costs.handover + costs.overhead
    share = training.groups_per_step / generation.replicas
    admitted = share if is_sync else min(generation.groups_per_batch, share * (bound + 1))
    running = max(1, round(admitted * group_size))
    context = means.prompt + means.running
    per_token = costs.decode(running, round(running * context))
    generate = share * group_size * means.response * per_token / running
    generate += costs.prefill(round(share * means.prompt))
    if is_sync:
        return train + generate + costs.push
    # A generator may begin groups of at most bound + 1 steps before the next version has travelled to it.
    return max(train, generate, (costs.push + costs.handover) / (bound + 1))
