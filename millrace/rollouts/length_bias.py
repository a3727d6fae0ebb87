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
from dataclasses import dataclass, field

from millrace.rollouts.ledger import Amount
from millrace.rollouts.scored_group import LostPart, ScoredGroup

STEPS = 20
"""Length of the window."""
LOW, HIGH = 0.97, 1.03
"""Length ratios outside are a bias."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """Sums over some trajectories."""

    amount: Amount = field(default_factory=Amount)
    rewards: float = 0.0
    num_rewards: int = 0

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            amount=self.amount + other.amount,
            rewards=self.rewards + other.rewards,
            num_rewards=self.num_rewards + other.num_rewards,
        )


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
        # (trained, taken) by step; the last entry is of the step to come.
        self._steps: deque[tuple[_Sums, _Sums]] = deque([(_Sums(), _Sums())], maxlen=STEPS + 1)
        self._biased = False

    def take(self, group: ScoredGroup | LostPart, trained: Sequence[int] = ()) -> None:
        """Counts a group for the next step; `trained` are the members that it trains."""
        sum_trained, sum_taken = self._steps[-1]
        group_taken = _Sums(amount=group.amount()) if isinstance(group, LostPart) else _sums(group)
        group_trained = _sums(group, trained) if isinstance(group, ScoredGroup) else _Sums()
        self._steps[-1] = sum_trained + group_trained, sum_taken + group_taken

    def step(self) -> Ratios:
        """Ends a step, which trained at least one response. Returns the ratios of the window."""
        while len(self._steps) > STEPS:
            self._steps.popleft()
        trained = sum((step[0] for step in self._steps), _Sums())
        taken = sum((step[1] for step in self._steps), _Sums())
        self._steps.append((_Sums(), _Sums()))
        length, taken_length = _length(trained), _length(taken)
        trained_last, taken_last = self._steps[-2]
        reward, taken_reward = _reward(trained), _reward(taken)
        return Ratios(
            length_ratio=length / taken_length,
            reward_ratio=reward / taken_reward if taken_reward > 0 else None,
            trained_length=length,
            taken_length=taken_length,
            step_length_ratio=_length(trained_last) / _length(taken_last),
        )

    def has_left(self, ratios: Ratios) -> bool:
        """Whether the length ratio has just left its bounds. False during the first steps, and until it was back."""
        was_biased = self._biased
        self._biased = len(self._steps) > STEPS and not LOW <= ratios.length_ratio <= HIGH
        return self._biased and not was_biased


def _sums(group: ScoredGroup, members: Sequence[int] | None = None) -> _Sums:
    chosen = group.selected if members is None else members
    rewards = [reward for i in chosen if (reward := group.rewards[i]) is not None]
    return _Sums(amount=group.amount(list(chosen)), rewards=sum(rewards), num_rewards=len(rewards))


def _length(sums: _Sums) -> float:
    return sums.amount.tokens / sums.amount.rollouts


def _reward(sums: _Sums) -> float:
    return sums.rewards / sums.num_rewards
