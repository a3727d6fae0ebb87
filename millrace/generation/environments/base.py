"""The interface of environments: the policy's turn in, an `Observation` out, until one says that it is done.

prompt ─► reset
policy: 12+34 is <12+34> ─► step ─► 46|              the policy continues after it
policy: 46<end>          ─► step ─► done
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An environment's answer to one turn of the policy."""

    text: str = ""
    """Appended to the response, for the policy to read before its next turn; ignored when `done`."""
    done: bool = False
    """Whether that turn was the last one, which the reward scores."""


class Environment(ABC):
    """The other side of one trajectory. Each trajectory gets its own object, made without arguments.

    It runs in the generator's process and thread, between two turns: a step must be cheap and local. Its answers must
    depend only on the prompt, the seed and the turns so far, so that a trajectory can be generated again. An exception
    ends the trajectory, which then counts as an error, not as a reward of 0.
    """

    stop: ClassVar[tuple[str, ...]] = ()
    """Texts that end the policy's turn, besides the end-of-sequence token: such as the end of a tool call."""
    alphabet: ClassVar[str] = ""
    """The characters of its answers and calls, for the tokenizer of a bootstrapped model."""

    @abstractmethod
    def reset(self, prompt: Prompt, seed: int) -> None:
        """Begins a trajectory of this prompt; `seed` is the trajectory's own, 63 bits."""

    @abstractmethod
    def step(self, text: str) -> Observation:
        """Answers one turn of the policy.

        `text` includes a stop text and special tokens, but not the end-of-sequence token.
        """

    def example(self, prompt: Prompt) -> Sequence[str]:
        """Turns that lead to the prompt's answer, without the answer itself, for demonstrations of a warm start."""
        return ()
