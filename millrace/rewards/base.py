"""What every reward is: a prompt and a response in, a `Score` out. A reward that fails is an error, never a 0."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from millrace.types import Prompt

ScoreStatus = Literal["ok", "timeout", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a verifier says about one response. Raises ValueError when its fields contradict each other."""

    reward: float | None
    """What the policy is trained to raise, finite, in the reward's own unit; None unless `status` is `ok`."""
    components: dict[str, float] = field(default_factory=dict)
    """Named parts the reward was made of, in their own units."""
    status: ScoreStatus = "ok"
    """`ok`: there is a reward; `timeout`: the verifier took too long; `error`: it failed."""
    error: str | None = None
    """What went wrong, in one line; None when `status` is `ok`."""

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.error is None):
            raise ValueError(
                f"status is {self.status} and error is {self.error!r}; expected an error exactly when not ok"
            )
        if self.status != "ok" and self.reward is not None:
            raise ValueError(f"status is {self.status} and reward is {self.reward}; expected no reward")
        if self.status == "ok" and (self.reward is None or not math.isfinite(self.reward)):
            raise ValueError(f"reward is {self.reward}; expected a finite number")


class Reward(ABC):
    """A verifier of responses."""

    name: ClassVar[str]
    """What configs call it."""
    version: ClassVar[str]
    """Changes whenever the same response could get another reward than before."""

    @abstractmethod
    def score(self, prompt: Prompt, response: str) -> Score:
        """Judge the decoded `response` to `prompt`. May raise anything; callers go through `safe_score`."""


def safe_score(reward: Reward, prompt: Prompt, response: str) -> Score:
    """Judge a response; whatever the reward raises becomes a score with status `error` and no reward."""
    try:
        return reward.score(prompt, response)
    except Exception as error:  # noqa: BLE001 — a failed verification is data, stored with its reason
        return Score(reward=None, status="error", error=" ".join(f"{type(error).__name__}: {error}".split()))
