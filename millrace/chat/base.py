"""The interface between conversations and tokens.

messages ─► render ─► tokens up to the assistant's turn ─► engine ─► turn ─► parse ─► an environment's answer
                                                             ▲                              │ messages
                                                             └──── tokens ◄─── next_turn ◄──┘

Sampled tokens are never rendered again: `next_turn` gives the tokens to append after them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.types import Message

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"


class Rendered(NamedTuple):
    """Tokens before the policy's next turn: messages up to where that turn begins, or plain text."""

    tokens: tuple[int, ...]
    """Token ids."""
    message_starts: tuple[tuple[str, int], ...] = ()
    """(role, index of its first token) of each message, ascending, that of the assistant's turn to come included;
    empty for plain text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call of the policy, as its renderer reads it."""

    name: str
    """Of the function; empty if the call can't be read."""
    arguments: dict[str, Any]
    """By name; empty if the call can't be read."""
    problem: str | None = None
    """Why the call can't be read; None if it can."""
    id: str | None = None
    """The call's own id, in formats that have one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A turn of the policy, parsed."""

    content: str
    """The text without reasoning and tool calls."""
    reasoning: str | None = None
    """The thought before it; None if the format has no such part or the turn has none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Every attempt at a call, in order."""


class ChatRenderer(ABC):
    """How one family of models writes conversations."""

    name: str
    """For people: which renderer this is."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end the assistant's turn."""

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Rendered:
        """The tokens up to where the assistant's turn begins. Raises ChatError if they can't be written so."""

    @abstractmethod
    def write(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Sequence[int]:
        """The tokens of a conversation that the assistant ends. Raises ChatError if they can't be written."""

    @abstractmethod
    def next_turn(
        self, context: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> Rendered:
        """Returns what to append after `context` and the policy's `turn`: `messages`, up to the assistant's next turn.

        All are token ids as they were read and sampled; indices count from the first appended token. Raises ChatError
        if nothing can be appended without changing earlier tokens.
        """

    @abstractmethod
    def parse(self, turn: Sequence[int], context: Sequence[int], tools: Sequence[Message] = ()) -> Turn:
        """Reads the tokens of a turn that follows the tokens `context`."""

    @abstractmethod
    def check_several_turns(self, tools: Sequence[Message]) -> None:
        """Raises ChatError with one sentence if turns can't be appended to each other, or tool calls not be read."""
