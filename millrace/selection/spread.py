"""Groups whose rewards are all equal: which they are, how many, and when too many of them hold a run up.

    group taken ─► spread? ─no──► no advantage; with `drop_zero_advantage` dropped, another is generated in its place
                     │ yes                                      │
                     └─► trained                                └─► nine in ten of the last groups, ten steps' worth?
                                                                    an event, at most once a minute

A policy that always fails a prompt, or never does, learns nothing from it (DAPO, arXiv 2503.14476, §3.2).
"""

import math
import time
from collections import deque

from configs.training import SelectionConfig
from millrace.rollouts.scored_group import ScoredGroup
from millrace.selection.overlong import shaped_rewards

ZERO_ADVANTAGE = "zero_advantage"
"""The drop_reason of such a group."""
_WINDOW_STEPS, _STARVING = 10, 0.9
"""A run is held up if of the groups for so many steps at least this share had no spread: a step takes ten times its
groups."""
_EVENT_SECONDS = 60.0
"""Minimum time between two events."""


def has_spread(group: ScoredGroup, config: SelectionConfig) -> bool:
    """Whether rewards, shaped by length as configured, differ within the group: if not, its advantages are 0.

    At least one of its rewards is known.
    """
    rewards = shaped_rewards(group, config)
    return min(rewards) < max(rewards)


class SpreadFilter:
    """Drops groups without spread if the config asks for it, and counts them in any case.

    A trainer that is restarted begins a new count.
    """

    def __init__(self, config: SelectionConfig, groups_per_step: int) -> None:
        self._config = config
        self._recent: deque[bool] = deque(maxlen=_WINDOW_STEPS * groups_per_step)
        # Since the last step: groups, and those without spread.
        self._taken = self._without = 0
        self._t_event = -math.inf

    def drop_reason(self, group: ScoredGroup) -> str | None:
        """Counts a group that could be trained; `zero_advantage` if it is to be dropped."""
        spread = has_spread(group, self._config)
        self._recent.append(spread)
        self._taken += 1
        self._without += not spread
        return ZERO_ADVANTAGE if self._config.drop_zero_advantage and not spread else None

    def step(self) -> float:
        """The step, for which at least one group was taken, is done. Returns the share of its groups without spread,
        dropped ones included, 0 to 1."""
        share = self._without / self._taken
        self._taken = self._without = 0
        return share

    @property
    def share(self) -> float | None:
        """Share without spread of the last groups, up to ten steps' worth, 0 to 1; None before the first."""
        return self._recent.count(False) / len(self._recent) if self._recent else None

    def starving(self) -> str | None:
        """A sentence for people if dropped groups hold the run up; None if not, or if it was said just now."""
        window, share, now = len(self._recent), self.share, time.monotonic()
        if window != self._recent.maxlen or share is None or share < _STARVING:
            return None
        if now - self._t_event < _EVENT_SECONDS:
            return None
        self._t_event = now
        return (
            f"{self._recent.count(False)} of the last {window} groups ({share:.0%}) were dropped because their rewards "
            "are all equal; training waits for groups with spread: use prompts that the policy sometimes solves, or "
            "resume with training.selection.drop_zero_advantage=false"
        )
