"""The pipeline in simulated time: the product's rules, durations from `Costs`, no process and no tensor.

    generators ─► finished groups ─► parts ─► scorers ─► ready groups ─► trainer ─► step ─► version ─► generators
        ▲                                                                  └─► dropped ─► room ─┐
        └───────────────────────────────────────────────────────────────────────────────────────┘

Events are calls on one agenda, in the order of their time. If stages share too few cores, all that are busy slow down
by the same factor. So events keep their order: only the clock on the wall runs faster than that of the work.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from configs.schema import RunConfig
from millrace.control.rule import Reading
from millrace.control.staleness import StalenessControl
from millrace.planning.durations import Costs, Lengths
from millrace.planning.generator import Generator, Group
from millrace.rollouts.staleness import (
    admission_limit,
    consumption_order,
    is_too_old,
    max_in_flight,
    oldest_trainable,
    staleness,
    step_leaves_too_old,
)
from millrace.weights.base import AdmissionPolicy
from storage.layout import scorer_of_part


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Figures of the steps after the warm-up, named and counted as `millrace status` does."""

    step_seconds: float
    """Mean, from the end of one step to the end of the next."""
    tokens_per_second: float
    """Response tokens trained."""
    staleness_mean: float
    """Of the rollouts trained, policy versions; masked tokens aside."""
    staleness_max: int
    dropped_share: float
    """Of the rollouts that the trainer took."""
    masked_token_share: float
    """Of the response tokens trained."""
    length_ratio: float
    """Mean length of the rollouts trained ÷ of all that the trainer took."""
    idle: Mapping[str, float]
    """Share of the time that a stage had nothing to do, by stage: `generate`, `score`, `train`; mean over replicas."""


def simulate(config: RunConfig, costs: Costs, lengths: Lengths, *, steps: int, warmup: int) -> Outcome:
    """Simulates `steps` steps of a campaign, the first `warmup` of which do not count. Deterministic."""
    if not 0 <= warmup < steps:
        raise ValueError(f"{steps} steps with {warmup} of warm-up leave none to count")
    return Campaign(config, costs, lengths).run(steps, warmup)


class _Held(NamedTuple):
    """What the next step trains of a group."""

    group: Group
    rollouts: int
    tokens: int
    """Of these responses."""


@dataclass(slots=True)
class _Tally:
    """Sums over what the trainer took."""

    taken_rollouts: int = 0
    taken_tokens: int = 0
    trained_rollouts: int = 0
    trained_tokens: int = 0
    masked_tokens: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    wall: float = 0.0
    """Time on the wall at which the sums began."""
    busy: dict[str, float] = field(default_factory=dict)
    """Seconds of work by stage up to then."""

    @property
    def length_ratio(self) -> float:
        """Mean length of what was trained ÷ of what was taken."""
        return self.trained_tokens / self.trained_rollouts / (self.taken_tokens / self.taken_rollouts)


class Campaign:
    """A campaign in which nothing has happened yet. Times are of the work, seconds, unless they are on the wall."""

    def __init__(self, config: RunConfig, costs: Costs, lengths: Lengths) -> None:
        self.config, self.costs, self.lengths = config, costs, lengths
        self.now = 0.0
        self.arrived = -1
        """The newest version that generators may load."""
        self.num_busy = 0
        """Generators that are at work."""
        generation, groups = config.generation, config.training.groups_per_step
        self._by_step = config.pipeline.mode == "sync"
        places = max_in_flight(
            by_step=self._by_step,
            groups_per_step=groups,
            groups_per_batch=generation.groups_per_batch,
            group_size=generation.group_size,
        )
        self.control = StalenessControl(
            config.staleness,
            generation,
            AdmissionPolicy(max_staleness=config.effective_max_staleness, places=places),
            groups_per_step=groups,
        )
        self._generators = [Generator(number, self, places) for number in range(generation.replicas)]
        self._replicas = {"generate": generation.replicas, "score": config.scoring.replicas, "train": 1}
        self._threads = generation.threads, config.scoring.threads, config.training.threads
        self._adapts = config.staleness.control == "adaptive"
        # A heap of (time, order, action, arguments).
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        # By generator: until when what it finishes joins the newest part, and that part.
        self._open_part: list[tuple[float, list[Group]]] = [(0.0, []) for _ in self._generators]
        self._num_parts = [0] * generation.replicas
        waits = config.staleness.too_old == "wait"
        self._window = 0.0 if waits else config.storage.commit_max_ms / 1000
        self._queues: list[deque[list[Group]]] = [deque() for _ in range(config.scoring.replicas)]
        self._scoring = [False] * config.scoring.replicas
        self._unscored: set[Group] = set()
        self._ready: list[tuple[tuple[int, int], Group]] = []
        self._version = 0
        self._pushing = False
        self._held: list[_Held] = []
        self._groups_dropped = 0
        self._trains = True
        self._waits_for_old = waits and not self._by_step
        self._wall = self._free_places = 0.0
        self._busy = dict.fromkeys(self._replicas, 0.0)
        self._tally, self._step = _Tally(), _Tally()
        self._warmup = 0

    def run(self, steps: int, warmup: int) -> Outcome:
        """Runs to the end of the last step."""
        self._warmup = warmup
        self._begin_counting()
        # The start weights are handed over like any others.
        self.schedule(self.costs.handover, self._push)
        self.schedule(self.costs.handover, self._resume)
        while self._version < steps:
            if not self._agenda:
                raise RuntimeError("the simulated campaign stands still: no request is in flight, and no step is made")
            t, _, action, arguments = heapq.heappop(self._agenda)
            self._advance(t)
            action(*arguments)
        return self._outcome(steps - warmup)

    def schedule(self, t: float, action: Callable[..., None], *arguments: object) -> None:
        """Does something at `t`, after what is scheduled for the same time already."""
        heapq.heappush(self._agenda, (t, next(self._order), action, arguments))

    def limit(self, policy_version: int) -> int:
        """The first group number that a generator of this version may not admit yet."""
        return admission_limit(
            policy_version,
            max_staleness=self.control.terms(policy_version).max_staleness,
            groups_per_step=self.config.training.groups_per_step,
            groups_dropped=self._groups_dropped,
        )

    def admit(self, group: Group) -> None:
        """A generator begins a group."""
        self._unscored.add(group)

    def finish(self, generator: Generator, t: float, groups: Sequence[Group]) -> None:
        """Groups are whole at `t`. They are committed with what is finished soon after; in sync mode with the step."""
        number = generator.number
        t_commit, part = self._open_part[number]
        if t > t_commit and not self._by_step:
            part = []
            self._open_part[number] = t + self._window, part
            self.schedule(t + self._window, self._commit, number, part)
        part.extend(groups)
        if self._by_step and not generator.open:
            self._open_part[number] = 0.0, []
            self.schedule(t, self._commit, number, part)

    def _advance(self, t: float) -> None:
        """Lets the time pass up to `t`."""
        seconds = t - self.now
        if seconds <= 0:
            return
        decoding, scoring, training = self.num_busy, sum(self._scoring), int(self._trains)
        if self.costs.cores is not None:
            of_decoding, of_scoring, of_training = self._threads
            threads = decoding * of_decoding + scoring * of_scoring + training * of_training
            seconds *= max(1.0, threads / self.costs.cores)
        busy = self._busy
        busy["generate"] += decoding * seconds
        busy["score"] += scoring * seconds
        busy["train"] += training * seconds
        if self._adapts:
            self._free_places += seconds * sum(generator.free_share for generator in self._generators)
        self._wall += seconds
        self.now = t

    def _commit(self, generator: int, groups: list[Group]) -> None:
        """A part of a generator's stream goes to its scorer."""
        scorer = scorer_of_part(self._num_parts[generator], len(self._queues))
        self._num_parts[generator] += 1
        self._queues[scorer].append(groups)
        self._score(scorer)

    def _score(self, scorer: int) -> None:
        if self._scoring[scorer] or not self._queues[scorer]:
            return
        groups = self._queues[scorer].popleft()
        self._scoring[scorer] = True
        rollouts = sum(len(group.lengths) for group in groups)
        self.schedule(self.now + self.costs.score_part + self.costs.score * rollouts, self._scored, scorer, groups)

    def _scored(self, scorer: int, groups: Sequence[Group]) -> None:
        self._scoring[scorer] = False
        self._unscored.difference_update(groups)
        for group in groups:
            heapq.heappush(self._ready, (consumption_order(group.min_version, group.number), group))
        self._score(scorer)
        self._take()

    def _resume(self) -> None:
        """The trainer begins to wait for groups."""
        self._trains = False
        self._waits_for_old = self.config.staleness.too_old == "wait" and not self._by_step
        self._take()

    def _take(self) -> None:
        """The trainer, if it waits, takes groups, and begins a step once it has enough."""
        if self._trains or self._leaves_too_old():
            return
        num_dropped = 0
        while self._ready and len(self._held) < self.config.training.groups_per_step:
            num_dropped += not self._keep(heapq.heappop(self._ready)[1])
        if num_dropped:
            self._groups_dropped += num_dropped
            for generator in self._generators:
                generator.look_for_room()
        if len(self._held) == self.config.training.groups_per_step:
            self._begin_step()

    def _leaves_too_old(self) -> bool:
        """Whether the trainer waits for groups in flight that the next step would leave too old."""
        if self._waits_for_old:
            bound = self.control.bound_at(self._version + 1)
            self._waits_for_old = any(
                step_leaves_too_old(group.min_version, self._version, bound) for group in self._unscored
            )
        return self._waits_for_old

    def _keep(self, group: Group) -> bool:
        """Takes a group. Returns whether some of it is trained."""
        bound = self.control.bound_at(self._version)
        masks = self.config.staleness.too_old == "mask"
        first = oldest_trainable(self._version, bound)
        rollouts = tokens = masked_tokens = 0
        oldest = group.min_version
        if not is_too_old(oldest, self._version, bound):
            rollouts, tokens = len(group.lengths), sum(group.lengths)
        elif masks:
            oldest = self._version
            for start, length in zip(group.starts, group.lengths, strict=True):
                masked = group.history.tokens_before(first, start, length)
                if masked < length:
                    rollouts, tokens, masked_tokens = rollouts + 1, tokens + length, masked_tokens + masked
                    oldest = min(oldest, group.history.version_of_first_token(start + masked))
        age = staleness(self._version, oldest)
        for tally in (self._tally, self._step):
            tally.taken_rollouts += len(group.lengths)
            tally.taken_tokens += sum(group.lengths)
            tally.trained_rollouts += rollouts
            tally.trained_tokens += tokens
            tally.masked_tokens += masked_tokens
            tally.staleness_sum += age * rollouts
            tally.staleness_max = max(tally.staleness_max, age if rollouts else 0)
        if rollouts:
            self._held.append(_Held(group, rollouts, tokens))
        return rollouts > 0

    def _begin_step(self) -> None:
        costs, training = self.costs, self.config.training
        tokens, rollouts = 0, 0
        for held in self._held:
            tokens += held.tokens + (1 if training.share_prefixes else held.rollouts) * held.group.prompt_tokens
            rollouts += held.rollouts
        self._trains = True
        t_made = self.now + costs.train(tokens, rollouts) + costs.handover
        checkpoint = costs.checkpoint if (self._version + 1) % training.checkpoint_every == 0 else 0.0
        self.schedule(t_made, self._made)
        self.schedule(t_made + costs.overhead + checkpoint, self._resume)

    def _made(self) -> None:
        """A step is done."""
        self._version += 1
        reading = Reading(
            effective_sample_size=1.0,
            length_ratio=self._step.length_ratio,
            steps_ready=len(self._ready) / self.config.training.groups_per_step,
            trainer_waited=self._wall - self._busy["train"],
            trainer_seconds=self._wall,
            generators_waited=self._free_places,
            generators_seconds=len(self._generators) * self._wall,
        )
        self.control.step(self._version, reading)
        self._held, self._step = [], _Tally()
        if self._version == self._warmup:
            self._begin_counting()
        self._push()

    def _push(self) -> None:
        """Brings the newest version to the generators, unless another one is still on its way."""
        if not self._pushing and self.arrived < self._version:
            self._pushing = True
            self.schedule(self.now + self.costs.push, self._arrive, self._version)

    def _arrive(self, version: int) -> None:
        self.arrived, self._pushing = version, False
        for generator in self._generators:
            generator.load()
        self._push()

    def _begin_counting(self) -> None:
        self._tally = _Tally(wall=self._wall, busy=dict(self._busy))

    def _outcome(self, steps: int) -> Outcome:
        tally = self._tally
        seconds = self._wall - tally.wall
        return Outcome(
            step_seconds=seconds / steps,
            tokens_per_second=tally.trained_tokens / seconds,
            staleness_mean=tally.staleness_sum / tally.trained_rollouts,
            staleness_max=tally.staleness_max,
            dropped_share=1 - tally.trained_rollouts / tally.taken_rollouts,
            masked_token_share=tally.masked_tokens / tally.trained_tokens,
            length_ratio=tally.length_ratio,
            idle={
                stage: max(0.0, 1 - (self._busy[stage] - tally.busy[stage]) / (replicas * seconds))
                for stage, replicas in self._replicas.items()
            },
        )
