"""One simulated campaign: its stages, and the agenda of what happens to all of them.

generators ─► finished groups ─► parts ─► scorers ─► ready groups ─► trainer ─► step ─► version ─► generators
    ▲                                                                  └─► dropped ─► room ─┐
    └───────────────────────────────────────────────────────────────────────────────────────┘
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from configs.schema import RunConfig
from millrace.control.measured import Reading
from millrace.planning.simulation.clock import WallClock, stage_times
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.engine import Generator
from millrace.planning.simulation.faults import Faults, GeneratorFailures
from millrace.planning.simulation.group import Group, count_down, count_up
from millrace.planning.simulation.lengths import Lengths
from millrace.planning.simulation.outcome import Outcome, Trace, Trained
from millrace.planning.simulation.readings import reading_of
from millrace.planning.simulation.scorers import Scorers
from millrace.planning.simulation.shared import AT_ONCE, Shared
from millrace.planning.simulation.trainer import Trainer
from millrace.rollouts.staleness import is_too_old, step_leaves_too_old

_MADE, _WEIGHTS, _RESUME, _FAILURE = range(4)
"""Events, those of one moment in this order: a version is made, generators may take it, the trainer takes groups, a
generator dies."""
_MANY = 1 << 62
_ALL = -1
"""In place of a generator's number."""
_LAST_STEPS = 16


class TooFarAheadError(Exception):
    """A generator was simulated beyond the time at which a version reached it."""


class Campaign:
    """Nothing has happened yet. `ahead`: share of a step by which generators may be ahead of a trainer that waits."""

    def __init__(
        self,
        config: RunConfig,
        costs: Costs,
        lengths: Lengths,
        slots: int | None,
        faults: Faults | None,
        trace: Trace | None,
        *,
        ahead: float,
        later: Mapping[int, Costs],
        drift: float,
    ) -> None:
        self._config, self._costs, self._trace, self._ahead = config, costs, trace, ahead
        self._later, self._drift = later, drift
        self._failures = GeneratorFailures(Faults() if faults is None else faults)
        self._shared = Shared(config, costs, lengths, slots)
        self._shared.admitted = None if trace is None else []
        self._generators = [Generator(number, self._shared) for number in range(config.generation.replicas)]
        self._scorers = Scorers(config, costs, may_change=bool(later))
        self._trainer = Trainer(config, costs, self._shared.control)
        self._by_step = config.pipeline.mode == "sync"
        self._masks = config.staleness.too_old == "mask"
        # Policy version → how many finished groups that are not scored yet have it as their newest.
        self._scored_later: dict[int, int] = {}
        # By generator, in sync mode: what is finished of its share of the step.
        self._shares: list[list[tuple[float, Group]]] = [[] for _ in self._generators]
        # The newest version that generators may take, and whether another one is on its way.
        self._arrived, self._pushing = -1, False
        # (time, event, order, version of the weights, generator or _ALL): a heap.
        self._agenda: list[tuple[float, int, int, int, int]] = []
        self._order = itertools.count()
        # The trainer's: whether it waits for groups, and whether for those first that a step would leave too old.
        self._waits = self._waits_for_old = False
        self._now = 0.0
        # Up to where generators were simulated while it waits.
        self._reached = 0.0
        self._t_waits = 0.0
        self._idle: list[tuple[float, float]] = []
        self._waited = 0.0
        self._last_steps: deque[float] = deque(maxlen=_LAST_STEPS)
        self._trained: list[Trained] = []
        self._readings: list[tuple[int, Reading]] = []

    def run(self, steps: int, warmup: int) -> Outcome:
        """Raises TooFarAheadError if a step was shorter than the look-ahead took for granted."""
        self._begin_counting()
        # The start weights are handed over like any others.
        self._schedule(self._costs.handover, _MADE, 0)
        self._schedule(self._costs.handover, _RESUME, 0)
        for generator in self._generators:
            self._expect_failure(generator)
        while (version := self._trainer.policy_version) < steps:
            if self._waits:
                self._wait()
            else:
                self._until(self._agenda[0][0])
            if version < self._trainer.policy_version == warmup:
                self._begin_counting()
        return self._outcome(steps - warmup)

    def _until(self, t: float) -> None:
        """Everything up to the first event on the agenda, which is at `t`; the trainer takes nothing meanwhile."""
        for generator in self._generators:
            if generator.t_next <= t + AT_ONCE:
                generator.advance(t)
        self._collect()
        for t_ready, groups in self._scorers.ready_until(t):
            self._receive(t_ready, groups)
        self._now = t
        self._happen()

    def _wait(self) -> None:
        """What happens next while the trainer waits for groups."""
        generators, scorers = self._generators, self._scorers
        t_event = self._agenda[0][0] if self._agenda else math.inf
        t_first = min(scorers.t_next, min(generator.t_next for generator in generators))
        horizon = min(t_event, max(t_first, self._now + self._look_ahead()))
        if horizon == math.inf:
            raise RuntimeError("the simulated campaign stands still: no request is in flight, and no step can be made")
        # A group that is dropped makes room, at once, for one of those who have none.
        num_droppable = self._num_droppable()
        in_order = [one for one in generators if one.gets_room(num_droppable)] if num_droppable else []
        for generator in generators:
            if generator.t_next <= horizon + AT_ONCE:
                generator.advance(horizon, while_fed=generator in in_order)
        self._reached = max(self._reached, horizon)
        self._collect()
        starved = [generator for generator in in_order if generator.starved]
        horizon = min([horizon, *(generator.t_next for generator in starved)])
        while (t := scorers.t_next) <= horizon:
            ready = list(scorers.ready_until(t))
            for t_ready, groups in ready:
                self._receive(t_ready, groups)
            self._now = t
            if ready and self._look():
                return
        self._now = horizon
        for generator in starved:
            if generator.t_next <= horizon + AT_ONCE:
                generator.advance(horizon)
        self._collect()
        if horizon == t_event:
            self._until(t_event)

    def _look_ahead(self) -> float:
        """For how long, probably, nothing reaches a generator from a trainer that waits."""
        return self._ahead * min(self._last_steps, default=0.0) if not self._waits_for_old else 0.0

    def _num_droppable(self) -> int:
        """How many groups the trainer may have to drop, at most, before its next step."""
        version, bound, shared = self._trainer.policy_version, self._trainer.bound, self._shared
        # While it waits for old groups, others that are old may be scored and not taken.
        if self._waits_for_old or any(is_too_old(one.policy_version, version, bound) for one in self._generators):
            return _MANY
        # If old tokens are masked, a group in flight has at least its last token left: its generator is young enough.
        counts = self._scored_later if self._masks else shared.unready
        return sum(count for one, count in counts.items() if is_too_old(one, version, bound))

    def _collect(self) -> None:
        """Takes what generators finished to the scorers."""
        finished, unready = self._shared.finished, self._shared.unready
        for t, group in finished:
            if group.min_version != group.admitted_version:
                count_down(unready, group.admitted_version)
                count_up(unready, group.min_version)
            count_up(self._scored_later, group.max_version)
            if self._by_step:
                self._shares[group.generator].append((t, group))
            else:
                self._scorers.add(t, group)
        finished.clear()
        if self._by_step:
            # A part is a whole share of the step.
            for generator in self._generators:
                if not generator.open and (share := self._shares[generator.number]):
                    self._scorers.commit(share[-1][0], generator.number, [group for _, group in share])
                    share.clear()

    def _receive(self, t: float, groups: Sequence[Group]) -> None:
        for group in groups:
            count_down(self._shared.unready, group.min_version)
            count_down(self._scored_later, group.max_version)
        self._trainer.receive(t, groups)

    def _happen(self) -> None:
        """The first event on the agenda."""
        _, event, _, version, number = heapq.heappop(self._agenda)
        if event == _MADE:
            if version:
                self._made(version)
            self._push()
        elif event == _RESUME:
            self._resume()
        elif event == _FAILURE:
            self._fail(self._generators[number])
        else:
            self._arrived = max(self._arrived, version)
            for generator in self._generators if number == _ALL else [self._generators[number]]:
                self._arrive(generator)
            if number == _ALL:
                self._pushing = False
                self._push()

    def _made(self, version: int) -> None:
        """A step is done."""
        reading = reading_of(
            self._trainer, self._generators, self._shared, now=self._now, waited=self._waited, drift=self._drift
        )
        self._readings.append((self._trainer.bound, reading))
        self._shared.control.step(version, reading)
        self._trained.append(Trained(self._now, version, *self._trainer.step()))
        if (costs := self._later.get(version)) is not None:
            self._charge(costs)

    def _charge(self, costs: Costs) -> None:
        """Everything takes as long as these say from now on."""
        self._costs = costs
        self._shared.charge(costs)
        self._scorers.charge(costs)
        self._trainer.charge(costs)

    def _expect_failure(self, generator: Generator) -> None:
        if (t := self._failures.next_after(max(self._now, generator.t_loaded))) < math.inf:
            self._schedule(t, _FAILURE, 0, generator.number)

    def _fail(self, generator: Generator) -> None:
        """A generator dies, unless it is just loading weights, and loads the newest ones when it is back."""
        if generator.t_loaded <= self._now and generator.policy_version >= 0:
            self._failures.add(self._trainer.policy_version)
            lost = self._shares[generator.number]
            for _, group in lost:
                count_down(self._shared.unready, group.min_version)
                count_down(self._scored_later, group.max_version)
            t_back = self._now + self._failures.recovery
            generator.fail(self._now, t_back, [group.number for _, group in lost])
            lost.clear()
            self._schedule(t_back, _WEIGHTS, self._arrived, generator.number)
        self._expect_failure(generator)

    def _push(self) -> None:
        """Brings the newest version to the generators, unless another one is still on its way."""
        newest = self._trainer.policy_version
        if not self._pushing and self._arrived < newest:
            self._pushing = True
            self._schedule(self._now + self._costs.push, _WEIGHTS, newest)

    def _arrive(self, generator: Generator) -> None:
        """A generator may take the version that arrived last."""
        if generator.t_loaded > self._now + AT_ONCE:
            # Not before it has loaded another one.
            self._schedule(generator.t_loaded, _WEIGHTS, self._arrived, generator.number)
        elif generator.policy_version < self._arrived:
            generator.take(self._arrived, self._now)

    def _resume(self) -> None:
        """The trainer begins to wait for groups."""
        self._waits, self._t_waits, self._reached = True, self._now, self._now
        self._waits_for_old = self._config.staleness.too_old == "wait" and not self._by_step
        self._look()

    def _look(self) -> bool:
        """The trainer takes groups, and begins a step if there are enough. Returns whether there is news for others."""
        trainer = self._trainer
        if self._waits_for_old:
            versions = self._shared.in_flight(self._now)
            version = trainer.policy_version
            bound = self._shared.control.bound_at(version + 1)
            self._waits_for_old = any(step_leaves_too_old(one, version, bound) for one in versions)
            if self._waits_for_old:
                return False
        num_dropped = trainer.take(self._now)
        if num_dropped:
            self._shared.groups_dropped += num_dropped
            for generator in self._generators:
                generator.look_for_room(self._now)
        if trainer.is_full:
            self._begin_step()
        return num_dropped > 0 or trainer.is_full

    def _begin_step(self) -> None:
        costs, version = self._costs, self._trainer.policy_version + 1
        t_made = self._now + self._trainer.step_seconds() + costs.handover
        if t_made < self._reached:
            raise TooFarAheadError
        self._idle.append((self._t_waits, self._now))
        self._waited += self._now - self._t_waits
        self._waits = False
        self._last_steps.append(t_made - self._now)
        checkpoint = costs.checkpoint if version % self._config.training.checkpoint_every == 0 else 0.0
        self._schedule(t_made, _MADE, version)
        self._schedule(t_made + costs.overhead + checkpoint, _RESUME, version)

    def _schedule(self, t: float, event: int, version: int, generator: int = _ALL) -> None:
        heapq.heappush(self._agenda, (t, event, next(self._order), version, generator))

    def _begin_counting(self) -> None:
        """Counts from now on."""
        self._trainer.tally.clear(self._now)
        for generator in self._generators:
            generator.count_free_places(self._now)
        self._shared.free_places.clear()

    def _outcome(self, steps: int) -> Outcome:
        now, idle = self._now, []
        self._trainer.end(now)
        for generator in self._generators:
            generator.count_free_places(now)
            idle += generator.idle_until(now)
        stages = stage_times(self._config, generate=idle, score=self._scorers.idle_until(now), train=self._idle)
        clock = WallClock(stages.values(), self._costs.cores)
        if self._trace is not None and self._shared.admitted is not None:
            self._trace.add(self._shared.admitted, self._trained, clock)
            self._trace.readings += self._readings
        outcome = self._trainer.tally.outcome(
            steps=steps,
            t_end=now,
            stages=stages,
            free=self._shared.free_places,
            places=len(self._generators) * self._shared.places,
            clock=clock,
        )
        return replace(outcome, restarts={"generate": self._failures.count}) if self._failures.count else outcome
