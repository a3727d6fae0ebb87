"""One generator: it admits its groups under the bound, and its engine decodes their requests together.

    own groups ─► n under the bound, a place free? ─► requests wait ─► a slot free? ─► prefill ─► decode ─► whole groups
                                                                                       ▲           │
                                                        new weights: pause, all caches ┴───────────┘

All requests that are decoded advance together, a token each per `rate` seconds. So a request ends when the generator's
token clock has advanced by its length, whatever becomes of the rate: these ends are kept in tokens, sorted, and neither
new weights nor a change of rate touches one of them.
"""

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

from millrace.planning.simulation.group import TOGETHER, Group, History, count_down
from millrace.planning.simulation.shared import AT_ONCE, Shared
from millrace.rollouts.group_sequence import GroupSet


class Generator:
    """Idle at time 0, and without weights."""

    def __init__(self, number: int, shared: Shared) -> None:
        self.number = number
        self.policy_version = -1
        """Of its weights; -1: it has none yet."""
        self.t_loaded = 0.0
        """When it has loaded them: it takes no others before."""
        self.t_next = math.inf
        """When the next request ends."""
        self.idle: list[tuple[float, float]] = []
        """(begin, end) of the times without a request."""
        self.open = 0
        """Requests of the groups admitted, without those that ended."""
        self.places = shared.places
        """Requests that it may have in flight under its weights."""
        self._shared = shared
        self._idle_since: float | None = 0.0
        # It has been simulated up to here. While it computes prompts or loads weights, this is when it goes on.
        self._t = 0.0
        self._history = History()
        self._limit = 0
        self._numbers: Iterator[int] = GroupSet.empty(number, shared.num_generators).lacking()
        self._next = next(self._numbers)
        # Groups with requests that have no slot yet; of the first one some may have.
        self._waiting: deque[Group] = deque()
        # Token clock at which each request that is decoded ends, negative, so that the next one is the last of the
        # list: ascending, without two that are equal.
        self._ends: list[float] = []
        # One of these → group, and the clock at which a request without a prompt would have begun to fill the cache as
        # much.
        self._running: dict[float, tuple[Group, float]] = {}
        # Those of the ends at which several requests end.
        self._tied: set[float] = set()
        # The sum of the clocks in `_running`.
        self._origins = 0.0
        # In an engine that pads: (such a clock, end), a heap, in which requests that ended stay until they come up.
        self._oldest: list[tuple[float, float]] = []
        self._clock = 0.0
        self._rate = 0.0
        # Free places are counted up to here.
        self._t_counted = 0.0

    @property
    def starved(self) -> bool:
        """Whether a place is free because the bound admits no group."""
        return self.open < self.places

    def gets_room(self, num_dropped: int) -> bool:
        """Whether it may admit a group once the trainer has dropped so many more."""
        return self._next < self._limit + num_dropped

    def advance(self, until: float, *, while_fed: bool = False) -> None:
        """Everything that ends up to then; if `while_fed`, only until it is starved."""
        shared = self._shared
        places, group_size, prefill, group_rows = self.places, shared.group_size, shared.prefill, shared.group_rows
        pads, collect = shared.pads, shared.collect
        free_places, exact = shared.free_places, shared.free_places.exact
        rates, rows, shift, finished = shared.rates, shared.rates.rows, shared.rates.shift, shared.finished
        ends, running, tied, waiting, limit = self._ends, self._running, self._tied, self._waiting, self._limit
        t, t_last, clock, origins, rate = self._t, self._t_counted, self._clock, self._origins, self._rate
        num_open, num_running = self.open, len(ends)
        row = rows[num_running]
        until += AT_ONCE
        while num_running and not (while_fed and num_open < places):
            at = ends[-1]
            t_end = t + (-at - clock) * rate
            if t_end > until:
                break
            if tied and at in tied:
                self._t, self._t_counted, self._clock, self._origins, self.open = t, t_last, clock, origins, num_open
                self._end_together(t_end, -at)
                t, t_last, clock, origins, rate = self._t, t_end, -at, self._origins, self._rate
                num_open, num_running = self.open, len(ends)
                row = rows[num_running]
                continue
            if num_open < places:
                if exact:
                    free_places.count(t_last, t_end, places - num_open)
                else:
                    free_places.place_seconds += (places - num_open) * (t_end - t_last)
            t, t_last, clock = t_end, t_end, -at
            group, origin = running.pop(at)
            ends.pop()
            origins -= origin
            group.unfinished -= 1
            num_open -= 1
            if not group.unfinished:
                group.end(self.policy_version)
                t += group_rows
                finished.append((t, group))
            t += collect
            if num_open < places and self._next < limit:
                waiting.append(self._admit(t))
                num_open += group_size
            if waiting:
                group = waiting[0]
                starts, prompt_tokens = group.starts, group.prompt_tokens
                at = -(clock + group.lengths[len(starts)])
                if at in running:
                    tied.add(at)
                    while at in running:
                        at = math.nextafter(at, -math.inf)
                starts.append(clock)
                if len(starts) == group_size:
                    waiting.popleft()
                origin = clock - prompt_tokens
                running[at] = group, origin
                origins += origin
                if pads:
                    heapq.heappush(self._oldest, (origin, at))
                insort(ends, at)
                t += prefill(prompt_tokens)
            else:
                num_running -= 1
                if not num_running:
                    self._idle_since = t
                    break
                row = rows[num_running]
            # Tokens in the cache half-way to the next end.
            counted = num_running * self._oldest_origin() if pads else origins
            key = int(num_running * (clock - ends[-1] - 1) / 2 - counted) >> shift
            rate = row.get(key) or rates.ask(num_running, key)
        self._t, self._t_counted, self._clock, self._origins, self._rate = t, t_last, clock, origins, rate
        self.open = num_open
        self.t_next = t + (-ends[-1] - clock) * rate if ends else math.inf

    def take(self, policy_version: int, t: float) -> None:
        """Loads a version at `t`, not before `t_loaded`, and goes on with what is in flight."""
        self._stop_at(t)
        self._end_idle(t)
        pause = self._shared.pause
        if self._ends:
            pause += self._shared.recompute(round(len(self._ends) * self._clock - self._counted_origins()))
        self._t += pause
        self.t_loaded = t + pause
        self.policy_version = policy_version
        self._history.add(self._clock, policy_version)
        self._limit = self._shared.limit(policy_version)
        self.places = self._shared.control.terms(policy_version).places
        open_before = self.open
        self._submit(self.t_loaded)
        if num_groups := (self.open - open_before) // self._shared.group_size:
            self._shared.admitted_later.append((self.t_loaded, policy_version, num_groups))

    def look_for_room(self, t: float) -> None:
        """The trainer has dropped groups."""
        self._limit = self._shared.limit(self.policy_version)
        if self.starved and self._next < self._limit and self.policy_version >= 0:
            self._stop_at(t)
            # It may have been simulated beyond `t`, until it was starved.
            self._submit(max(t, self.t_loaded, self._t_counted))

    def fail(self, t: float, t_back: float, others: Sequence[int]) -> None:
        """Dies at `t`: its groups in flight, and `others` that it had finished, begin again, not before `t_back`."""
        self._stop_at(t)
        groups = {group.number: group for group, _ in self._running.values()}
        groups |= {group.number: group for group in self._waiting}
        for group in groups.values():
            count_down(self._shared.unready, group.admitted_version)
        self._numbers = chain(sorted([*groups, *others]), [self._next], self._numbers)
        self._next = next(self._numbers)
        for kept in (self._waiting, self._ends, self._running, self._tied, self._oldest):
            kept.clear()
        self._origins, self.open = 0.0, 0
        self._idle_since = t if self._idle_since is None else self._idle_since
        self.policy_version, self.t_loaded, self.t_next = -1, t_back, math.inf

    def count_free_places(self, t: float) -> None:
        """Up to `t`, up to which it has been simulated."""
        if t > self._t_counted:
            if self.starved:
                self._shared.free_places.count(self._t_counted, t, self.places - self.open)
            self._t_counted = t

    def idle_until(self, t: float) -> list[tuple[float, float]]:
        """(begin, end) of the times without a request before `t`."""
        return self.idle if self._idle_since is None else [*self.idle, (self._idle_since, max(t, self._idle_since))]

    def _end_together(self, t: float, clock: float) -> None:
        """Several requests end at `t`: what follows them is submitted at once."""
        self.count_free_places(t)
        self._t, self._clock = t, clock
        self._tied.discard(-clock)
        whole: list[Group] = []
        while self._ends and -self._ends[-1] - clock < TOGETHER:
            group, origin = self._running.pop(self._ends.pop())
            self._origins -= origin
            self.open -= 1
            group.unfinished -= 1
            if not group.unfinished:
                group.end(self.policy_version)
                whole.append(group)
        # They are committed together.
        self._t += self._shared.group_rows * len(whole)
        self._shared.finished += [(self._t, group) for group in whole]
        self._t += self._shared.collect
        self._submit(self._t)

    def _stop_at(self, t: float) -> None:
        """Between two ends. Nothing happens if it computes prompts or loads weights until later than `t`."""
        self.count_free_places(t)
        if t <= self._t:
            return
        if self._ends:
            self._clock = min(self._clock + (t - self._t) / self._rate, -self._ends[-1])
        self._t = t

    def _submit(self, t: float) -> None:
        """Admits what there is room for, gives free slots to requests, and computes their prompts."""
        shared = self._shared
        while self.open < self.places and self._next < self._limit:
            self._waiting.append(self._admit(t))
            self.open += shared.group_size
        prompt_tokens = 0
        while self._waiting and len(self._ends) < shared.slots:
            group = self._waiting[0]
            # Requests of one group that start together have one prompt.
            prompt_tokens += group.prompt_tokens
            self._start(group, shared.slots - len(self._ends))
            if len(group.starts) == shared.group_size:
                self._waiting.popleft()
        if prompt_tokens:
            self._t += shared.prefill(prompt_tokens)
        if not self._ends:
            self._idle_since = t if self._idle_since is None else self._idle_since
            self.t_next = math.inf
            return
        self._end_idle(t)
        self._ends.sort()
        num_running, end = len(self._ends), -self._ends[-1]
        key = int(num_running * (self._clock + end - 1) / 2 - self._counted_origins()) >> shared.rates.shift
        self._rate = shared.rates.rows[num_running].get(key) or shared.rates.ask(num_running, key)
        self.t_next = self._t + (end - self._clock) * self._rate

    def _start(self, group: Group, slots: int) -> None:
        """Starts requests of a group, as many as it has left and there are slots for. Their ends are not sorted yet."""
        clock, ends, running, starts = self._clock, self._ends, self._running, group.starts
        origin = clock - group.prompt_tokens
        entry = group, origin
        for length in group.lengths[len(starts) : len(starts) + slots]:
            at = -(clock + length)
            if at in running:
                self._tied.add(at)
                while at in running:
                    at = math.nextafter(at, -math.inf)
            starts.append(clock)
            running[at] = entry
            self._origins += origin
            if self._shared.pads:
                heapq.heappush(self._oldest, (origin, at))
            ends.append(at)

    def _oldest_origin(self) -> float:
        """Of the requests that are decoded, in an engine that pads."""
        oldest, running = self._oldest, self._running
        while oldest[0][1] not in running:
            heapq.heappop(oldest)
        return oldest[0][0]

    def _counted_origins(self) -> float:
        """The sum of the origins, in an engine that pads as if each were the oldest."""
        return len(self._ends) * self._oldest_origin() if self._shared.pads else self._origins

    def _admit(self, t: float) -> Group:
        shared, version = self._shared, self.policy_version
        group = Group(self._next, self.number, version, self._history, *shared.of_group(self._next))
        self._next = next(self._numbers)
        shared.unready[version] = shared.unready.get(version, 0) + 1
        if shared.admitted is not None:
            shared.admitted.append((t, group))
        return group

    def _end_idle(self, t: float) -> None:
        if self._idle_since is not None:
            self.idle.append((self._idle_since, t))
            self._idle_since = None
