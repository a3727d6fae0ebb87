"""Rewards as the trainer uses them: shaped by length, weighed by source, and groups without spread left out.

Soft overlong punishment (DAPO, arXiv 2503.14476, §3.4):

    shaped − stored
      0  ────────────────╮                       L = max_new_tokens, b = overlong_buffer
                          ╲
     −1                    ╲
         0           L − b   L   response tokens

Advantages are made of the shaped rewards. The stored ones, and all that is shown of them, stay as they are. The shaped
reward follows from the stored row and the config, so a replay computes the same.

A policy that always fails a prompt, or never does, learns nothing from its rewards (DAPO, §3.2). A group whose rewards
are all equal has no advantage. With `drop_zero_advantage` it is dropped, unless it has a teacher, and another is
generated in its place. Nine in ten of
ten steps' worth of groups without spread raise an event, at most once a minute.
"""

import json
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping

from configs.training import SelectionConfig
from millrace.rollouts.scored_group import ScoredGroup

ZERO_ADVANTAGE = "zero_advantage"
"""The drop_reason of such a group."""
_SHARE = "zero_advantage_share"
_WINDOW_STEPS, _STARVING = 10, 0.9
"""A run is starving if at least this share of the groups of the last steps had no spread: at 0.9, a step takes ten
times its groups."""
_EVENT_SECONDS = 60.0
"""Minimum time between two events."""


def shaped_rewards(group: ScoredGroup, config: SelectionConfig) -> list[float]:
    """[verified members] rewards that the group's advantages are made of.

    Tokens that an environment wrote count towards the length, as they do towards `max_new_tokens`.
    """
    rewards = [(reward, len(group.response_tokens[i])) for i, reward in enumerate(group.rewards) if reward is not None]
    buffer = config.overlong_buffer
    if buffer is None:
        return [reward for reward, _ in rewards]
    first = group.max_new_tokens - buffer
    return [reward - min(length - first, buffer) / buffer if length > first else reward for reward, length in rewards]


def source_factor(group: ScoredGroup, factors: Mapping[str, float]) -> float:
    """The factor of the group's advantages, by the task that its prompt is from; 1 if there is none for that task."""
    if not factors:
        return 1.0
    # As `millrace.prompts.packages.PromptSource.text`. Another source names no task.
    task = json.loads(group.meta)["source"].partition(" ")[0].partition(":")[2]
    return factors.get(task, 1.0)


class SpreadFilter:
    """Drops groups without spread if the config asks for it, and counts them since the trainer's start in any case."""

    def __init__(self, config: SelectionConfig, groups_per_step: int) -> None:
        self._config = config
        self._recent: deque[bool] = deque(maxlen=_WINDOW_STEPS * groups_per_step)
        # Since the last step, by source: groups, and those without spread.
        self._taken, self._without = Counter[str](), Counter[str]()
        self._t_event = -math.inf

    def drop_reason(self, group: ScoredGroup) -> str | None:
        """Counts a group that could be trained; `zero_advantage` if it is to be dropped."""
        rewards = shaped_rewards(group, self._config)
        # A response without others, a demonstration, has nothing to differ from.
        spread = len(group.rewards) == 1 or min(rewards) < max(rewards)
        self._recent.append(spread)
        self._taken[group.source] += 1
        self._without[group.source] += not spread
        return ZERO_ADVANTAGE if self._config.drop_zero_advantage and not spread and not group.is_taught else None

    def step(self, sources: Collection[str] = ()) -> dict[str, float]:
        """Ends a step. Returns metrics: the share of its groups, dropped ones included, without spread, 0 to 1.

        Those of `sources` that had a group have a metric each.
        """
        shares = {_SHARE: self._without.total() / self._taken.total()}
        for source in sources:
            if self._taken[source]:
                shares[f"{_SHARE}/{source}"] = self._without[source] / self._taken[source]
        self._taken.clear()
        self._without.clear()
        return shares

    @property
    def share(self) -> float | None:
        """Share without spread of the last groups, up to ten steps' worth, 0 to 1; None before the first."""
        return self._recent.count(False) / len(self._recent) if self._recent else None

    def starving(self) -> str | None:
        """Returns a warning if dropped groups hold the run up; None if not, or within a minute of the last warning."""
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
