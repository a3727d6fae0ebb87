"""What every reward is: a prompt and a response in, a `Score` out. A reward that fails is an error, never a 0."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from millrace.types import Prompt

ScoreStatus = Literal["ok", "timeout", "error"]

_LONGEST_ERROR = 500
"""Characters: what a library raises may quote the whole response."""


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
    version: str
    """Changes whenever the same response could get another reward than before; there once the reward is loaded."""
    isolated: bool = False
    """Whether it runs code that is not ours, or can take for ever: then it judges in a process that can be killed."""
    fresh: ClassVar[bool] = False
    """Whether each response is judged by a process that has judged no other; means something only where isolated."""
    batch_size: ClassVar[int] = 1
    """Responses that `score_batch` takes at once."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Keyword options that make this reward again by its name in another process, as plain JSON."""
        return {}

    def load(self) -> None:  # noqa: B027 — most have nothing to load
        """Imports and reads what judging takes. Called once, in the process that judges.

        What is not loaded yet is cheap to make, and has looked at its options. Raises InputError for what can't be
        used.
        """

    def warm_up(self) -> None:  # noqa: B027 — most are as fast at first as ever
        """Makes the first response cost what any does. Called in every process that judges, before it is given one."""

    @abstractmethod
    def score(self, prompt: Prompt, response: str) -> Score:
        """Judge the decoded `response` to `prompt`. May raise anything; callers go through `safe_score`."""

    def score_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """Judge up to `batch_size` responses, in their order; what is raised becomes scores with status `error`."""
        return [safe_score(self, prompt, response) for prompt, response in pairs]


def safe_score(reward: Reward, prompt: Prompt, response: str) -> Score:
    """Judge a response; whatever the reward raises becomes a score with status `error` and no reward."""
    try:
        return reward.score(prompt, response)
    # sys.exit() and the time-outs of some libraries are no Exceptions.
    except BaseException as error:  # noqa: BLE001 — a failed verification is data, stored with its reason
        return failed(f"{type(error).__name__}: {error}")


def failed(reason: str, status: ScoreStatus = "error") -> Score:
    """A score without a reward: `reason` on one line, shortened, and without what no file can hold."""
    line = " ".join(reason[: 2 * _LONGEST_ERROR].split()).encode("utf-8", "backslashreplace").decode()
    shown = line if len(line) <= _LONGEST_ERROR else f"{line[: _LONGEST_ERROR - 1]}…"
    return Score(reward=None, status=status, error=shown)
