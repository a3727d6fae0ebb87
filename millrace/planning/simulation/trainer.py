"""What the trainer takes, drops, masks and trains: the rules of `millrace/stages/train/train_loop.py`, without tokens.

ready groups ─► oldest weights first ─► too old? ──yes──► drop, or mask their old tokens ─► nothing left? drop
                                          │ no                    │ some left
                                          ▼                       ▼
                              groups_per_step of them ─► step ─► version + 1
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from configs.schema import RunConfig
from millrace.planning.simulation.control import Control
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.figures import Tally
from millrace.planning.simulation.group import Group
from millrace.rollouts.ledger import Amount
from millrace.rollouts.staleness import consumption_order, is_too_old, oldest_trainable, staleness


class Held(NamedTuple):
    """A group of the next step."""

    group: Group
    rollouts: int
    """That carry loss."""
    tokens: int
    """Of these responses."""
    staleness: int


class Trainer:
    """Of version 0, and with nothing to do, at time 0."""

    def __init__(self, config: RunConfig, costs: Costs, control: Control) -> None:
        self.policy_version = 0
        self.held: list[Held] = []
        """Groups of the next step."""
        self.dropped: list[int] = []
        """Numbers of the groups dropped since the last step."""
        self.tally = Tally()
        """Of what it took."""
        self._config = config
        self.charge(costs)
        self._groups_per_step = config.training.groups_per_step
        self._control = control
        self.bound = control.bound_at(0)
        """The bound for what it takes at this version."""
        self.taken = Amount()
        """Since the last step."""
        self._masks = config.staleness.too_old == "mask"
        # A heap of ready groups.
        self._ready: list[tuple[tuple[int, int], Group]] = []

    def charge(self, costs: Costs) -> None:
        """A step that is begun from now on takes as long as these say."""
        self._costs = costs

    def end(self, t: float) -> None:
        """Counts the groups that still wait."""
        for _, group in self._ready:
            self.tally.wait(group.t_ready, t)

    def receive(self, t: float, groups: Sequence[Group]) -> None:
        """Groups are scored."""
        for group in groups:
            group.t_ready = t
            heapq.heappush(self._ready, (consumption_order(group.min_version, group.number), group))

    def take(self, t: float) -> int:
        """Takes groups until there are enough for a step, or none is left. Returns how many of them it dropped."""
        num_dropped = 0
        while self._ready and not self.is_full:
            group = heapq.heappop(self._ready)[1]
            self.tally.wait(group.t_ready, t)
            if not self._keep(group):
                num_dropped += 1
                self.dropped.append(group.number)
        return num_dropped

    @property
    def is_full(self) -> bool:
        """Whether there are enough groups for a step."""
        return len(self.held) == self._groups_per_step

    def step_seconds(self) -> float:
        """How long a step on the groups held takes, without the hand-over."""
        once = self._config.training.share_prefixes
        tokens = sum(held.tokens + (1 if once else held.rollouts) * held.group.prompt_tokens for held in self.held)
        return self._costs.train(tokens, sum(held.rollouts for held in self.held))

    def measured(self, drift: float) -> tuple[float, float, float]:
        """Of the step on the groups held: its ESS, its length ratio, and the groups left behind in steps' worth.

        χ² of their policies, 1 ÷ ESS − 1, is `drift` times the mean square of the staleness of the tokens trained.
        """
        rollouts, tokens = sum(held.rollouts for held in self.held), sum(held.tokens for held in self.held)
        squares = sum(held.tokens * held.staleness**2 for held in self.held)
        taken_length = self.taken.tokens / self.taken.rollouts
        ess = 1 / (1 + drift * squares / tokens)
        return ess, tokens / rollouts / taken_length, len(self._ready) / self._groups_per_step

    def step(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The step is done. Returns the groups trained, ascending, and those dropped since the step before."""
        groups, dropped = tuple(sorted(held.group.number for held in self.held)), tuple(self.dropped)
        self.policy_version += 1
        self.bound = self._control.bound_at(self.policy_version)
        self.held, self.dropped, self.taken = [], [], Amount()
        return groups, dropped

    def _keep(self, group: Group) -> bool:
        """Counts a group, and whether it is trained on."""
        version, tokens, rollouts = self.policy_version, sum(group.lengths), len(group.lengths)
        self.tally.take(rollouts, tokens)
        self.taken += Amount(rollouts=rollouts, tokens=tokens)
        if not is_too_old(group.min_version, version, self.bound):
            age = staleness(version, group.min_version)
            self.tally.train(rollouts, tokens, age)
            self.held.append(Held(group, rollouts, tokens, age))
            return True
        return self._masks and self._keep_masked(group)

    def _keep_masked(self, group: Group) -> bool:
        """Keeps the members that have a token young enough."""
        version, history = self.policy_version, group.history
        first = oldest_trainable(version, self.bound)
        rollouts = tokens = masked_tokens = 0
        oldest = version
        for start, length in zip(group.starts, group.lengths, strict=True):
            masked = history.tokens_before(first, start, length)
            if masked < length:
                rollouts, tokens, masked_tokens = rollouts + 1, tokens + length, masked_tokens + masked
                oldest = min(oldest, history.version_of_first_token(start + masked))
        if rollouts:
            age = staleness(version, oldest)
            self.tally.train(rollouts, tokens, age, masked_tokens)
            self.held.append(Held(group, rollouts, tokens, age))
        return rollouts > 0
