"""One simulated generator: it admits its groups under the bound, and its engine decodes their requests together.

    own groups ─► under the bound, room? ─► requests wait ─► a free slot? ─► prefill ─► decode ─► whole groups
                                                                              ▲           │
                          new weights: pause, caches unless they are kept ────┴───────────┘

All requests that are decoded advance together, a token each per `rate` seconds. So a request ends when the generator's
token clock has advanced by its length, whatever happens to the rate: ends are kept in tokens.
"""

import heapq
import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.planning.simulation import Campaign

_TOGETHER = 1e-6
"""Tokens. Token clocks are sums of rounded numbers, so ends that differ by less happen at once."""


class VersionHistory:
    """Policy versions of a generator by its token clock."""

    def __init__(self) -> None:
        self._clocks: list[float] = []
        self._versions: list[int] = []

    def add(self, clock: float, policy_version: int) -> None:
        """Notes that from `clock` on the generator samples with this version, which is newer than those before."""
        self._clocks.append(clock)
        self._versions.append(policy_version)

    def version_of_first_token(self, start: float) -> int:
        """Returns the version that samples the first token of a request that starts at clock `start`."""
        return self._versions[bisect_left(self._clocks, start + 1 - _TOGETHER) - 1]

    def tokens_before(self, policy_version: int, start: float, length: int) -> int:
        """Counts, of the first `length` tokens of a request that starts at `start`, those of versions before this."""
        index = bisect_left(self._versions, policy_version)
        if index == len(self._versions):
            return length
        return min(length, max(0, int(self._clocks[index] - start + _TOGETHER)))


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """A group from its admission to the trainer."""

    number: int
    min_version: int
    """The version that admitted it; once it is whole, the oldest version that sampled a token of it."""
    history: VersionHistory
    prompt_tokens: int
    lengths: Sequence[int]
    starts: list[float] = field(default_factory=list)
    """By the generator's token clock, of those members that have started."""
    num_ended: int = 0


class SimulatedGenerator:
    """Idle at time 0, and without weights."""

    def __init__(self, number: int, campaign: "Campaign", slots: int) -> None:
        self._campaign = campaign
        self._slots = slots
        self._policy_version = -1
        self._num_open = 0
        """Requests of the groups admitted, without those that ended."""
        self._numbers = itertools.count(number, campaign.config.generation.replicas)
        self._next = next(self._numbers)
        self._history = VersionHistory()
        # Groups with requests that have no slot yet; of the first one some may have.
        self._waiting: deque[SimulatedGroup] = deque()
        # A heap of (clock at the end, order, group, clock at which its cache would have been empty).
        self._running: list[tuple[float, int, SimulatedGroup, float]] = []
        self._order = itertools.count()
        self._origins = 0.0
        """Sum of the last ones of `_running`."""
        # It has been simulated up to `_t`. While it computes prompts or loads weights, this is when it continues.
        self._t = self._t_loaded = 0.0
        self._clock = self._rate = 0.0
        self._planned = 0
        self._is_busy = False

    def load(self) -> None:
        """Loads the newest version that has arrived, and continues the requests in flight."""
        campaign = self._campaign
        if campaign.arrived <= self._policy_version:
            return
        if campaign.now < self._t_loaded:
            campaign.schedule(self._t_loaded, self.load)
            return
        self._run_until(campaign.now)
        self._t += campaign.costs.pause
        if self._running and not campaign.config.generation.keep_cache:
            self._t += campaign.costs.prefill(round(self._cached_tokens(self._clock)))
        self._t_loaded = self._t
        self._policy_version = campaign.arrived
        self._history.add(self._clock, self._policy_version)
        self._admit()

    def look_for_room(self) -> None:
        """Admits groups if the trainer's drops made room."""
        if self._policy_version >= 0 and self._has_room():
            self._run_until(self._campaign.now)
            self._admit()

    def _has_room(self) -> bool:
        return self._num_open < self._slots and self._next < self._campaign.limit(self._policy_version)

    def _run_until(self, t: float) -> None:
        if t > self._t:
            if self._running:
                self._clock = min(self._clock + (t - self._t) / self._rate, self._running[0][0])
            self._t = t

    def _end(self, planned: int) -> None:
        """Ends the next requests, unless something has changed since this was planned."""
        if planned != self._planned:
            return
        campaign, running, clock = self._campaign, self._running, self._running[0][0]
        self._t, self._clock = campaign.now, clock
        whole = []
        while running and running[0][0] - clock < _TOGETHER:
            _, _, group, origin = heapq.heappop(running)
            self._origins -= origin
            self._num_open -= 1
            group.num_ended += 1
            if group.num_ended == len(group.lengths):
                group.min_version = self._history.version_of_first_token(group.starts[0])
                whole.append(group)
        self._t += campaign.costs.rollout * sum(len(group.lengths) for group in whole)
        for group in whole:
            campaign.finish(group, self._t)
        self._admit()

    def _admit(self) -> None:
        """Admits groups while there is room, gives free slots to requests, and computes their prompts."""
        campaign = self._campaign
        while self._has_room():
            group = SimulatedGroup(
                self._next, self._policy_version, self._history, *campaign.lengths.of_group(self._next)
            )
            self._next = next(self._numbers)
            self._waiting.append(group)
            self._num_open += len(group.lengths)
            campaign.unscored.add(group)
        prompt_tokens = 0
        while self._waiting and len(self._running) < self._slots:
            group = self._waiting[0]
            # Requests of one group that start together have one prompt.
            prompt_tokens += group.prompt_tokens
            self._start(group, self._slots - len(self._running))
            if len(group.starts) == len(group.lengths):
                self._waiting.popleft()
        if prompt_tokens:
            self._t += campaign.costs.prefill(prompt_tokens)
        self._plan_end()

    def _start(self, group: SimulatedGroup, slots: int) -> None:
        origin = self._clock - group.prompt_tokens
        first = len(group.starts)
        for length in group.lengths[first : first + slots]:
            heapq.heappush(self._running, (self._clock + length, next(self._order), group, origin))
            group.starts.append(self._clock)
            self._origins += origin

    def _plan_end(self) -> None:
        """Schedules the next end, which replaces the one planned."""
        self._planned += 1
        if not self._running:
            # It may still be making rows.
            self._campaign.schedule(self._t, self._rest, self._planned)
            return
        self._set_busy(is_busy=True)
        end = self._running[0][0]
        half_way = (self._clock + end - 1) / 2
        self._rate = self._campaign.costs.decode(len(self._running), int(self._cached_tokens(half_way)))
        self._campaign.schedule(self._t + (end - self._clock) * self._rate, self._end, self._planned)

    def _cached_tokens(self, clock: float) -> float:
        """Tokens in the cache; in an engine that pads, as if all requests were as long as the longest."""
        num_running = len(self._running)
        if self._campaign.costs.pads:
            return num_running * (clock - min(request[3] for request in self._running))
        return num_running * clock - self._origins

    def _rest(self, planned: int) -> None:
        if planned == self._planned:
            self._set_busy(is_busy=False)

    def _set_busy(self, *, is_busy: bool) -> None:
        self._campaign.num_busy += is_busy - self._is_busy
        self._is_busy = is_busy
