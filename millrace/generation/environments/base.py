"""The interface of environments: the policy's turn in, an `Observation` out, until one says that it is done.

of text                                              of conversations (`ChatEnvironment`)
prompt ─► reset                                      prompt, tools ─► reset
policy: 12+34 is <12+34> ─► step ─► 46|              policy: calls calculator(12+34) ─► step ─► tool: 46
policy: 46<end>          ─► step ─► done             policy: It is 46.               ─► step ─► done
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace.chat.base import Turn
from millrace.errors import InputError, one_line
from millrace.forking.process_settings import working_folder_first
from millrace.types import Message, Prompt

_BUILT_IN = {
    "calculator": "millrace.generation.environments.calculator:Calculator",
    "calculator_tool": "millrace.generation.environments.calculator:CalculatorTool",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An environment's answer to one turn of the policy."""

    text: str = ""
    """Appended to the response, for the policy to read before its next turn; ignored when `done`. For an environment
    of text."""
    messages: tuple[Message, ...] = ()
    """Of tools or a user, at least one unless `done`, written in the model's chat template. For an environment of
    conversations."""
    done: bool = False
    """Whether that turn was the last one, which the reward scores."""


class AnyEnvironment(ABC):
    """The other side of one trajectory. Each trajectory gets its own object, made without arguments.

    It runs in the generator's process and thread, between two turns: a step must be cheap and local. Its answers must
    depend only on the prompt, the seed and the turns so far, so that a trajectory can be generated again. An exception
    ends the trajectory, which then counts as an error, not as a reward of 0.
    """

    stop: ClassVar[tuple[str, ...]] = ()
    """Texts that end the policy's turn, besides the model's own end tokens: such as the end of a tool call."""

    @abstractmethod
    def reset(self, prompt: Prompt, seed: int) -> None:
        """Begins a trajectory of this prompt; `seed` is the trajectory's own, 63 bits."""


class Environment(AnyEnvironment):
    """An environment that reads and writes text. See `AnyEnvironment` for the rules.

    Examples:
        >>> class Echo(Environment):
        ...     stop = ("?",)
        ...
        ...     def reset(self, prompt: Prompt, seed: int) -> None:
        ...         self.turns = 0
        ...
        ...     def step(self, text: str) -> Observation:
        ...         self.turns += 1
        ...         return Observation(done=True) if self.turns == 2 else Observation(text=text.upper())
        >>> echo = Echo()
        >>> echo.reset(Prompt(prompt_id="1", text="Ask me.", answer="yes", source="example"), seed=0)
        >>> echo.step("really?").text, echo.step("yes").done
        ('REALLY?', True)
    """

    alphabet: ClassVar[str] = ""
    """The characters of its answers and calls, for the tokenizer of a bootstrapped model."""

    @abstractmethod
    def step(self, text: str) -> Observation:
        """Answers one turn of the policy.

        `text` includes a stop text and special tokens, but not the end-of-sequence token.
        """

    def example(self, prompt: Prompt) -> Sequence[str]:
        """Turns that lead to the prompt's answer, without the answer itself, for demonstrations of a warm start."""
        return ()


class ChatEnvironment(AnyEnvironment):
    """The other side of a conversation: tools, or a user. It gets the turns parsed, and answers with messages."""

    tools: ClassVar[tuple[Message, ...]] = ()
    """Descriptions of its functions, which stand in every prompt."""

    @abstractmethod
    def step(self, turn: Turn) -> Observation:
        """Answers one turn of the policy. A call that can't be read has a `problem`; the answer may say so."""


def environment_class(name: str | None) -> type[AnyEnvironment] | None:
    """The environment that configs call `name`, one object per trajectory; None where a run has none.

    A name is `calculator`, `calculator_tool` or an import path `package.module:Class`. Raises InputError if there is no
    such class.
    """
    if name is None:
        return None
    expected = f"{', '.join(sorted(_BUILT_IN))} or package.module:Class"
    module_name, _, class_name = _BUILT_IN.get(name, name).partition(":")
    try:
        with working_folder_first():
            loaded = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        read = f'"{name}" ({type(error).__name__}: {one_line(error)})'
        raise InputError(read, key="environment.name", expected=expected) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Environment | ChatEnvironment)):
        expected = f"a subclass of Environment or ChatEnvironment of {__name__}"
        raise InputError(f'"{name}"', key="environment.name", expected=expected)
    return loaded
