"""Length bias: whether the trainer favours short or long responses, over the last steps.

    the last `STEPS` steps    trained  ║ mean length, mean reward ║ ─┐
                              taken    ║ mean length, mean reward ║ ─┴─► trained ÷ taken

Taken are the responses that were trained or dropped. Two kinds are not counted: `rolled_back` ones, which are generated
again, and those that `training.selection` leaves out at any age (groups without spread, truncated responses). Long
responses are the first to get too old. If they are dropped, the policy learns from the short ones and their rewards.

A restarted trainer begins a new window.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import numpy.typing as npt

from millrace.rollouts.scored_group import LostPart, ScoredGroup

STEPS = 20
"""Length of the window."""
LOW, HIGH = 0.97, 1.03
"""Length ratios outside are a bias."""

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """Trained ÷ taken, over the window."""

    length_ratio: float
    """Ratio of the mean response lengths."""
    reward_ratio: float | None
    """Ratio of the mean rewards; None if the mean of the taken responses is not above 0."""
    trained_length: float
    """Mean length of the trained responses, tokens."""
    taken_length: float
    step_length_ratio: float
    """As `length_ratio`, of the last step alone."""

    def metrics(self) -> dict[str, float]:
        """Metrics by name; `reward_ratio` only if it exists."""
        return {"length_ratio": self.length_ratio} | (
            {} if self.reward_ratio is None else {"reward_ratio": self.reward_ratio}
        )

    @property
    def sentence(self) -> str:
        """One-line summary."""
        return (
            f"over the last {STEPS} steps trained responses average {self.trained_length:.1f} tokens, all taken ones "
            f"{self.taken_length:.1f}: a ratio of {self.length_ratio:.3f}, expected {LOW} to {HIGH}"
        )


class LengthBias:
    """The sums over the last steps."""

    def __init__(self) -> None:
        # By step, of its trained and of its taken responses: `_sums`. The last entry is of the step to come.
        self._steps: deque[Values] = deque([np.zeros((2, 4))], maxlen=STEPS + 1)
        self._biased = False

    def take(self, group: ScoredGroup | LostPart, trained: Sequence[int] = ()) -> None:
        """Counts a group for the next step; `trained` are the members that it trains."""
        taken = [*range(group.left.rollouts)] if isinstance(group, LostPart) else group.selected
        self._steps[-1] += np.array([_sums(group, trained), _sums(group, taken)])

    def step(self) -> Ratios:
        """Ends a step. Returns the ratios of the window; those of means without a response are not a number."""
        window = list(self._steps)[-STEPS:]
        self._steps.append(np.zeros((2, 4)))
        (length, reward), (taken_length, taken_reward) = (_means(sums) for sums in np.sum(window, axis=0))
        step_length, step_taken_length = (_means(sums)[0] for sums in window[-1])
        return Ratios(
            length_ratio=length / taken_length,
            reward_ratio=reward / taken_reward if taken_reward > 0 else None,
            trained_length=length,
            taken_length=taken_length,
            step_length_ratio=step_length / step_taken_length,
        )

    def has_left(self, ratios: Ratios) -> bool:
        """Whether the length ratio has just left its bounds. False during the first steps, and until it was back."""
        was_biased = self._biased
        self._biased = len(self._steps) > STEPS and not LOW <= ratios.length_ratio <= HIGH
        return self._biased and not was_biased


def _sums(group: ScoredGroup | LostPart, members: Sequence[int]) -> list[float]:
    """Number of responses, of their tokens, of their rewards that are known, and the sum of these."""
    if isinstance(group, LostPart):
        return [group.left.rollouts, group.left.tokens, 0, 0] if members else [0, 0, 0, 0]
    rewards = [reward for i in members if (reward := group.rewards[i]) is not None]
    return [len(members), group.amount(list(members)).tokens, len(rewards), sum(rewards)]


def _means(sums: Values) -> tuple[float, float]:
    """Mean length and mean reward."""
    rollouts, tokens, num_rewards, rewards = sums.tolist()
    return tokens / rollouts if rollouts else nan, rewards / num_rewards if num_rewards else nan
