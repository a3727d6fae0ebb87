"""What a case should come to: the same policy over the same lengths, without processes, streams or overhead.

groups in flight ─► each request takes a place for as long as its length says ─► the group is whole
    ▲                                                                               │
    └── n < dropped + (η + version + 1) · B ◄── version + 1 ◄── step of B groups ◄──┘
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.long_tail.cases import GROUP_SIZE, Case


@dataclass(slots=True)
class _Group:
    number: int
    version: int
    """At its admission."""
    requests: list[tuple[float, float]] = field(default_factory=list)
    """(start, duration) of those that have or had a place."""
    unfinished: int = GROUP_SIZE


@dataclass(slots=True)
class _Taken:
    """A rollout that the trainer took after the warm-up."""

    staleness: int
    """Of its group, masked tokens aside."""
    seconds: float
    """Its length, as time."""
    masked: float
    """Part of it."""
    trained: bool


@dataclass(slots=True)
class Figures:
    """Of the steps after the warm-up."""

    share: float
    """Of the steps that generator or trainer could make alone."""
    dropped_share: float
    """Of the rollouts that the trainer took."""
    masked_token_share: float
    """Of the tokens trained."""
    staleness_mean: float
    staleness_max: int
    length_ratio: float
    """Mean length of the rollouts trained ÷ of all that the trainer took."""
    loss_share: float
    """Tokens that carried loss ÷ tokens that the engine could have sampled."""


def simulate(case: Case, *, steps: int, warmup: int) -> Figures:
    """The figures of `steps` steps without the first `warmup`."""
    return _Simulation(case, warmup).run(steps)


class _Simulation:
    """One campaign. A trainer or an engine alone makes a step in a time of 1."""

    def __init__(self, case: Case, warmup: int) -> None:
        tail = case.pace(1.0).long_tail
        assert tail is not None
        self._case, self._tail, self._warmup = case, tail, warmup
        self._version = self._admitted = self._dropped = 0
        # Requests of admitted groups, first in line for a place.
        self._waiting: deque[_Group] = deque()
        # (end, order of starting, group) of the requests that have places.
        self._running: list[tuple[float, int, _Group]] = []
        self._starts = itertools.count()
        self._unfinished: dict[int, _Group] = {}
        self._ready: list[_Group] = []
        # When the step in progress ends, if there is one.
        self._t_step_ends = math.inf
        # When each version was made.
        self._t_made = [0.0]
        self._taken: list[_Taken] = []

    def run(self, steps: int) -> Figures:
        self._fill(0.0)
        while self._version < steps:
            t_next_end = self._running[0][0] if self._running else math.inf
            if self._t_step_ends <= t_next_end:
                now, self._t_step_ends = self._t_step_ends, math.inf
                self._version += 1
                self._t_made.append(now)
            else:
                now, _, group = heapq.heappop(self._running)
                group.unfinished -= 1
                if not group.unfinished:
                    self._ready.append(self._unfinished.pop(group.number))
            if self._t_step_ends == math.inf:
                self._take(now)
            self._fill(now)
        return self._figures()

    def _fill(self, now: float) -> None:
        """Gives free places to requests, and admits groups for the rest of them."""
        while len(self._running) < self._tail.places and (self._waiting or self._admit()):
            group = self._waiting.popleft()
            seconds = self._tail.tokens(group.number, len(group.requests)) * self._tail.seconds_per_token
            group.requests.append((now, seconds))
            heapq.heappush(self._running, (now + seconds, next(self._starts), group))

    def _admit(self) -> bool:
        """Whether the staleness bound let in another group."""
        room = (self._case.max_staleness + self._version + 1) * self._case.groups_per_step
        if self._admitted >= self._dropped + room:
            return False
        group = self._unfinished[self._admitted] = _Group(self._admitted, self._version)
        self._admitted += 1
        self._waiting += [group] * GROUP_SIZE
        return True

    def _take(self, now: float) -> None:
        """Begins a step if there is a batch for it."""
        oldest = self._version - self._case.max_staleness
        if self._case.mode == "drop":
            for group in [group for group in self._ready if group.version < oldest]:
                self._ready.remove(group)
                self._dropped += 1
                self._note(group, dropped=True)
        if self._case.mode == "wait" and any(group.version <= oldest for group in self._unfinished.values()):
            # It would be too old after this step.
            return
        if len(self._ready) < self._case.groups_per_step:
            return
        self._ready.sort(key=lambda group: group.version)
        for group in self._ready[: self._case.groups_per_step]:
            self._note(group, dropped=False)
        del self._ready[: self._case.groups_per_step]
        self._t_step_ends = now + 1.0

    def _note(self, group: _Group, *, dropped: bool) -> None:
        if self._version < self._warmup:
            return
        # What was sampled before this version was made is beyond the bound.
        fresh_from = self._t_made[max(0, self._version - self._case.max_staleness)]
        staleness = self._version - group.version
        if self._case.mode == "mask":
            staleness = min(staleness, self._case.max_staleness)
        for start, seconds in group.requests:
            masked = min(seconds, max(0.0, fresh_from - start))
            # A member without a token left only counts in the baseline.
            self._taken.append(_Taken(staleness, seconds, masked, not dropped and masked < seconds))

    def _figures(self) -> Figures:
        trained = [rollout for rollout in self._taken if rollout.trained]
        seconds, masked = sum(rollout.seconds for rollout in trained), sum(rollout.masked for rollout in trained)
        elapsed = self._t_made[-1] - self._t_made[self._warmup]
        return Figures(
            share=(self._version - self._warmup) / elapsed,
            dropped_share=1 - len(trained) / len(self._taken),
            masked_token_share=masked / seconds,
            staleness_mean=fmean(rollout.staleness for rollout in trained),
            staleness_max=max(rollout.staleness for rollout in trained),
            length_ratio=seconds / len(trained) / fmean(rollout.seconds for rollout in self._taken),
            loss_share=(seconds - masked) / (elapsed * self._tail.places),
        )
