"""From groups that are whole to groups that are scored: parts of the generators' streams, and their scorers.

generator 0: part k ─┐                                        free? the first generator's part, seconds per rollout
generator 1: part k ─┴─► scorer_of_part(k) ─► waits for it ───────────────────────────────────────► groups are ready
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence

from configs.schema import RunConfig
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.group import Group
from millrace.planning.simulation.shared import AT_ONCE
from storage.layout import scorer_of_part

Part = tuple[int, int, list[Group]]
"""(generator, its place in the generator's stream, groups): of those that wait, the least is scored first."""

_COMMITTED = -1
"""In place of a scorer: the part waits for one."""


class Scorers:
    """All scorers of a campaign, idle at time 0; `may_change`: whether `charge` may follow."""

    def __init__(self, config: RunConfig, costs: Costs, *, may_change: bool) -> None:
        self._num_scorers = config.scoring.replicas
        self._group_size = config.generation.group_size
        # Nothing ever waits for a scorer.
        self._at_once = not costs.score and not costs.score_part and not may_change
        self.charge(costs)
        # What is finished at about the same time is committed together; with `wait`, only what is finished at once.
        waits = config.staleness.too_old == "wait"
        self._window = (0.0 if waits else config.storage.commit_max_ms / 1000) + AT_ONCE
        self._parts = [0] * config.generation.replicas
        # By generator: when its newest part is committed, and the part.
        self._newest: list[tuple[float, Part] | None] = [None] * config.generation.replicas
        # (time, order, scorer that is done with it or _COMMITTED, part): a heap.
        self._events: list[tuple[float, int, int, Part]] = []
        self._order = itertools.count()
        # By generator: how many of its parts are ready, and the groups of those that are scored before others.
        self._num_ready = [0] * config.generation.replicas
        self._scored: list[dict[int, list[Group]]] = [{} for _ in self._num_ready]
        self._waiting: list[list[Part]] = [[] for _ in range(self._num_scorers)]
        # Scorers that may have a part to begin with now.
        self._free: set[int] = set()
        # By scorer: since when it is free, if it is.
        self._t_done: list[float | None] = [0.0] * self._num_scorers
        self.idle: list[tuple[float, float]] = []
        """(begin, end) of the times in which a scorer had nothing to do; of all of them, as far as they ended."""

    def charge(self, costs: Costs) -> None:
        """What is begun from now on takes as long as these say."""
        self._seconds = costs.score * self._group_size
        self._part_seconds = costs.score_part

    @property
    def t_next(self) -> float:
        """When the next part is committed or scored."""
        return self._events[0][0] if self._events else float("inf")

    def add(self, t: float, group: Group) -> None:
        """A group that its generator finished at `t`, after the one before."""
        newest = self._newest[group.generator]
        if newest is not None and t <= newest[0]:
            newest[1][2].append(group)
        else:
            self.commit(t + self._window - AT_ONCE, group.generator, [group])

    def commit(self, t: float, generator: int, groups: list[Group]) -> None:
        """A part of a generator's stream, after the one before."""
        part = generator, self._parts[generator], groups
        self._parts[generator] += 1
        self._newest[generator] = t + AT_ONCE, part
        heapq.heappush(self._events, (t, next(self._order), _COMMITTED, part))

    def ready_until(self, until: float) -> Iterator[tuple[float, Sequence[Group]]]:
        """(time, groups) of what becomes ready up to then, in order. What is not asked for stays for the next call."""
        events, until = self._events, until + AT_ONCE
        free = self._free
        while events and events[0][0] <= until:
            t, _, scorer, part = heapq.heappop(events)
            if self._at_once:
                yield t, part[2]
                continue
            if scorer == _COMMITTED:
                scorer = scorer_of_part(part[1], self._num_scorers)
                heapq.heappush(self._waiting[scorer], part)
            else:
                self._t_done[scorer] = t
                if groups := self._in_order(part):
                    yield t, groups
            free.add(scorer)
            # What is committed at the same time is chosen from.
            if not events or events[0][0] > t + AT_ONCE:
                for one in free:
                    self._score(t, one)
                free.clear()

    def _in_order(self, part: Part) -> list[Group]:
        """What becomes ready when this part is scored: the trainer reads each generator's parts in their order."""
        generator, number, groups = part
        scored = self._scored[generator]
        scored[number] = groups
        ready: list[Group] = []
        while (first := self._num_ready[generator]) in scored:
            ready += scored.pop(first)
            self._num_ready[generator] += 1
        return ready

    def idle_until(self, t: float) -> list[tuple[float, float]]:
        """(begin, end) of the times in which a scorer had nothing to do, before `t`."""
        return [*self.idle, *((done, max(t, done)) for done in self._t_done if done is not None)]

    def _score(self, t: float, scorer: int) -> None:
        """Begins with the next part, if it is free and one waits."""
        done = self._t_done[scorer]
        if done is None or not self._waiting[scorer]:
            return
        part = heapq.heappop(self._waiting[scorer])
        self.idle.append((done, t))
        self._t_done[scorer] = None
        t_scored = t + self._part_seconds + self._seconds * len(part[2])
        heapq.heappush(self._events, (t_scored, next(self._order), scorer, part))
