"""The pipeline in simulated time: the product's rules, durations from `Costs`, no process and no tensor.

    generators ─► finished groups ─► scorers ─► ready groups ─► trainer ─► step ─► version ─► generators
        ▲                                                        └─► dropped ─► room ─┐
        └─────────────────────────────────────────────────────────────────────────────┘

Events are calls on one agenda, in the order of their time. If stages share too few cores, all that are busy slow down
by the same factor. So events keep their order: only the clock on the wall runs faster than that of the work. The bound
is fixed: with adaptive control it is the highest allowed bound.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from configs.schema import RunConfig
from millrace.planning.durations import Costs, Lengths, max_group_size
from millrace.planning.generator import SimulatedGenerator, SimulatedGroup
from millrace.rollouts.staleness import (
    admission_limit,
    consumption_order,
    is_too_old,
    max_in_flight,
    oldest_trainable,
    staleness,
    step_leaves_too_old,
)


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
    """Simulates `steps` steps of a campaign without counting the first `warmup`. Deterministic."""
    if not 0 <= warmup < steps:
        raise ValueError(f"{steps} steps with {warmup} of warm-up leave none to count")
    return Campaign(config, costs, lengths).run(steps, warmup)


class Campaign:
    """A campaign in which nothing has happened yet. Times are of the work, seconds, unless they are on the wall."""

    def __init__(self, config: RunConfig, costs: Costs, lengths: Lengths) -> None:
        self.config, self.costs, self.lengths = config, costs, lengths
        self.now = 0.0
        self.arrived = -1
        """The newest version that generators may load."""
        self.num_busy = 0
        """Generators that are at work."""
        self.unscored: set[SimulatedGroup] = set()
        generation = config.generation
        self._by_step = config.pipeline.mode == "sync"
        self._bound = config.effective_max_staleness
        self._groups_per_step = config.training.groups_per_step
        slots = max_in_flight(
            by_step=self._by_step,
            groups_per_step=self._groups_per_step,
            groups_per_batch=generation.groups_per_batch,
            group_size=max_group_size(config),
        )
        self._generators = [SimulatedGenerator(number, self, slots) for number in range(generation.replicas)]
        self._replicas = {"generate": generation.replicas, "score": config.annotators.total("scores"), "train": 1}
        scoring, training = config.scoring, config.training
        self._threads = {"generate": generation.num_threads, "score": scoring.threads, "train": training.num_threads}
        # A heap of (time, order, action, arguments).
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._waits = config.staleness.too_old == "wait" and not self._by_step
        collects = config.staleness.too_old != "wait" and not self._by_step
        self._commit_seconds = config.storage.commit_max_ms / 1000 if collects else 0.0
        self._finished: deque[SimulatedGroup] = deque()
        self._num_scoring = 0
        self._ready: list[tuple[tuple[int, int], SimulatedGroup]] = []
        self._version = 0
        self._pushing = False
        # Groups, rollouts and tokens of the next step.
        self._held = self._held_rollouts = self._held_tokens = 0
        self._groups_dropped = 0
        self._trains = True
        self._waits_for_old = self._waits
        self._wall = 0.0
        self._busy = dict.fromkeys(self._replicas, 0.0)
        # Sums over the rollouts that the trainer took, by name.
        self._totals: Counter[str] = Counter()

    def run(self, steps: int, warmup: int) -> Outcome:
        """Runs to the end of the last step."""
        # The start weights are handed over like any others.
        self.schedule(self.costs.handover, self._push)
        self.schedule(self.costs.handover, self._resume)
        self._run_to_version(warmup)
        self._totals, begin, busy = Counter(), self._wall, dict(self._busy)
        self._run_to_version(steps)
        total, seconds = self._totals, self._wall - begin
        trained_length = total["trained tokens"] / total["trained rollouts"]
        return Outcome(
            step_seconds=seconds / (steps - warmup),
            tokens_per_second=total["trained tokens"] / seconds,
            staleness_mean=total["staleness"] / total["trained rollouts"],
            staleness_max=total["highest staleness"],
            dropped_share=1 - total["trained rollouts"] / total["taken rollouts"],
            masked_token_share=total["masked tokens"] / total["trained tokens"],
            length_ratio=trained_length / (total["taken tokens"] / total["taken rollouts"]),
            idle={
                stage: max(0.0, 1 - (self._busy[stage] - busy[stage]) / (replicas * seconds))
                for stage, replicas in self._replicas.items()
            },
        )

    def schedule(self, t: float, action: Callable[..., None], *arguments: object) -> None:
        """Schedules an action at `t`, after earlier ones for the same time."""
        heapq.heappush(self._agenda, (t, next(self._order), action, arguments))

    def limit(self, policy_version: int) -> int:
        """Returns the first group number that a generator of this version may not admit yet."""
        return admission_limit(
            policy_version,
            max_staleness=self._bound,
            groups_per_step=self._groups_per_step,
            groups_dropped=self._groups_dropped,
        )

    def finish(self, group: SimulatedGroup, t: float) -> None:
        """Commits a group that is whole at `t`, and passes it on to the scorers."""
        self.schedule(t + self._commit_seconds, self._commit, group)

    def _run_to_version(self, version: int) -> None:
        while self._version < version:
            if not self._agenda:
                raise RuntimeError("the simulated campaign stands still: no request is in flight, and no step is made")
            t, _, action, arguments = heapq.heappop(self._agenda)
            self._advance(t)
            action(*arguments)

    def _advance(self, t: float) -> None:
        """Lets the time pass up to `t`."""
        seconds = t - self.now
        if seconds <= 0:
            return
        working = {"generate": self.num_busy, "score": self._num_scoring, "train": int(self._trains)}
        if self.costs.cores is not None:
            threads = sum(number * self._threads[stage] for stage, number in working.items())
            seconds *= max(1.0, threads / self.costs.cores)
        for stage, number in working.items():
            self._busy[stage] += number * seconds
        self._wall += seconds
        self.now = t

    def _commit(self, group: SimulatedGroup) -> None:
        self._finished.append(group)
        self._score()

    def _score(self) -> None:
        while self._finished and self._num_scoring < self._replicas["score"]:
            self._num_scoring += 1
            group = self._finished.popleft()
            self.schedule(self.now + self.costs.score * len(group.lengths), self._scored, group)

    def _scored(self, group: SimulatedGroup) -> None:
        self._num_scoring -= 1
        self.unscored.discard(group)
        heapq.heappush(self._ready, (consumption_order(group.min_version, group.number), group))
        self._score()
        self._take()

    def _resume(self) -> None:
        """The trainer begins to wait for groups."""
        self._trains = False
        self._waits_for_old = self._waits
        self._take()

    def _take(self) -> None:
        """The trainer, if it waits, takes groups, and begins a step once it has enough."""
        if self._waits_for_old:
            # A step waits for groups in flight that it would leave too old.
            self._waits_for_old = any(
                step_leaves_too_old(group.min_version, self._version, self._bound) for group in self.unscored
            )
        if self._trains or self._waits_for_old:
            return
        num_dropped = 0
        while self._ready and self._held < self._groups_per_step:
            num_dropped += not self._hold(heapq.heappop(self._ready)[1])
        if num_dropped:
            self._groups_dropped += num_dropped
            for generator in self._generators:
                generator.look_for_room()
        if self._held == self._groups_per_step:
            self._begin_step()

    def _hold(self, group: SimulatedGroup) -> bool:
        """Takes a group for the next step. Returns whether some of it is trained."""
        rollouts = tokens = masked_tokens = 0
        oldest = group.min_version
        if self.config.bounds_admission_only or not is_too_old(oldest, self._version, self._bound):
            rollouts, tokens = len(group.lengths), sum(group.lengths)
        elif self.config.staleness.too_old == "mask":
            first, oldest = oldest_trainable(self._version, self._bound), self._version
            for start, length in zip(group.starts, group.lengths, strict=True):
                masked = group.history.tokens_before(first, start, length)
                if masked < length:
                    rollouts, tokens, masked_tokens = rollouts + 1, tokens + length, masked_tokens + masked
                    oldest = min(oldest, group.history.version_of_first_token(start + masked))
        total, age = self._totals, staleness(self._version, oldest)
        total["taken rollouts"] += len(group.lengths)
        total["taken tokens"] += sum(group.lengths)
        if not rollouts:
            return False
        total["trained rollouts"] += rollouts
        total["trained tokens"] += tokens
        total["masked tokens"] += masked_tokens
        total["staleness"] += age * rollouts
        total["highest staleness"] = max(total["highest staleness"], age)
        self._held += 1
        self._held_rollouts += rollouts
        num_prompts = 1 if self.config.training.share_prefixes else rollouts
        self._held_tokens += tokens + num_prompts * group.prompt_tokens
        return True

    def _begin_step(self) -> None:
        costs, training = self.costs, self.config.training
        t_done = self.now + costs.train(self._held_tokens, self._held_rollouts) + costs.handover
        checkpoint = costs.checkpoint if (self._version + 1) % training.checkpoint_every == 0 else 0.0
        self._trains = True
        self._held = self._held_rollouts = self._held_tokens = 0
        self.schedule(t_done, self._finish_step)
        self.schedule(t_done + costs.overhead + checkpoint, self._resume)

    def _finish_step(self) -> None:
        self._version += 1
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
