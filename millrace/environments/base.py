"""What every environment is: the policy's turn in, an `Observation` out, until it says that the talk is over.

prompt ─► reset
policy: 12+34 is <12+34> ─► step ─► 46|              the policy goes on behind it
policy: 46<end>          ─► step ─► done
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an environment answers to one turn of the policy."""

    text: str = ""
    """Stands in the response behind the turn, and the policy reads it before its next one; unread when `done`."""
    done: bool = False
    """Whether that turn was the last one, which is the one that gets judged."""


class Environment(ABC):
    """The other side of one rollout. Every rollout has an object of its own, made without arguments.

    It works in the generator's own process and thread, between two turns: a step must be cheap and local. What it
    answers must follow from the prompt, the seed and the turns so far alone, or a rollout could not be made again.
    Whatever it raises ends that rollout, which is then an error and no zero.
    """

    stop: ClassVar[tuple[str, ...]] = ()
    """Texts that end the policy's turn, beside the end-of-sequence token: such as the end of a call of a tool."""
    alphabet: ClassVar[str] = ""
    """Characters it and its calls are written in, for the tokenizer of a model that a run makes for itself."""

    @abstractmethod
    def reset(self, prompt: Prompt, seed: int) -> None:
        """A rollout of this prompt begins; `seed` is the rollout's own, 63 bits."""

    @abstractmethod
    def step(self, text: str) -> Observation:
        """Answers one turn of the policy.

        `text` is the turn's, a stop text and special tokens included, but not the end-of-sequence token.
        """

    def example(self, prompt: Prompt) -> Sequence[str]:
        """Turns that lead to the prompt's answer, without the answer itself: for demonstrations of a warm start."""
        return ()
