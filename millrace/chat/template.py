"""Conversations by the tokenizer's own chat template, for families that no renderer of the library knows.

    [user A] [assistant X]              ─► template ─► … X <end>\\n
    [user A] [assistant X] [tool T] +   ─► template ─► … X <end>\\n  <tool> T <end> <assistant>
                                                            └──────────────┬──────────────┘
                                       appended after what the policy sampled, which ends with <end>

A template is a program, so what it writes for a stand-in conversation is compared with what it writes for a longer one:
only if the shorter is the beginning of the longer can turns be appended.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from millrace.chat.base import ChatRenderer, Rendered, ToolCall, Turn
from millrace.errors import ChatError
from millrace.types import Message

_USER: Message = {"role": "user", "content": "ping"}
_ANSWER = "pong"
_ASSISTANT: Message = {"role": "assistant", "content": _ANSWER}
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_THINK_END = "</think>"


class TemplateRenderer(ChatRenderer):
    """The chat template of `tokenizer`. Raises ChatError if it has none, or one that ends no turn with a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ChatError("its tokenizer has no chat template; expected one there, or a file in model.chat_template")
        self.name = "the tokenizer's chat template"
        self._tokenizer = tokenizer
        self._end = self._turn_end()
        self.stop_token_ids = (self._end,)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Rendered:
        tokens = self._apply(messages, tools, turn_follows=True)
        starts, start = [], 0
        for number, message in enumerate(messages, start=1):
            starts.append((str(message["role"]), start))
            start = self._end_of_first(messages, number, tools, tokens, start)
        return Rendered(tuple(tokens), (*starts, ("assistant", start)))

    def next_turn(
        self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> Rendered:
        opening = _opening(messages[0])
        first = self._apply(opening, tools)
        whole = self._apply([*opening, *messages], tools, turn_follows=True)
        if whole[: len(first)] != first:
            raise ChatError(f"the chat template writes earlier turns anew when the {messages[0]['role']} answers")
        # Behind the end of the assistant's turn. If the policy ended it otherwise, that end is written for it.
        end = len(first) - first[::-1].index(self._end)
        if turn[-1] != self._end:
            end -= 1
        starts, start = [], end
        for number, message in enumerate(messages, start=1):
            starts.append((str(message["role"]), start - end))
            start = self._end_of_first([*opening, *messages], len(opening) + number, tools, whole, start)
        return Rendered(tuple(whole[end:]), (*starts, ("assistant", start - end)))

    def parse(self, turn: Sequence[int], before: Sequence[int], tools: Sequence[Message] = ()) -> Turn:
        special = {self._tokenizer.eos_token_id, self._end}
        text = self._decoded([token for token in turn if token not in special])
        thought, end, said = text.rpartition(_THINK_END)
        calls = tuple(_tool_call(body, bool(closed)) for body, closed in _CALL.findall(said)) if tools else ()
        return Turn(
            content=(_CALL.sub("", said) if tools else said).strip(),
            reasoning=thought.replace("<think>", "").strip() if end else None,
            tool_calls=calls,
        )

    def check_several_turns(self, tools: Sequence[Message]) -> None:
        asked = self._apply([_USER], tools, turn_follows=True)
        answered = self._apply([_USER, _ASSISTANT], tools)
        if answered[: len(asked)] != asked:
            raise ChatError(
                "the chat template writes a finished turn of the assistant otherwise than it begins one, so the tokens "
                "of several turns would not be those that were sampled"
            )
        self.next_turn([], [self._end], [{"role": "user", "content": "ping"}], tools)
        if tools:
            self.next_turn([], [self._end], [{"role": "tool", "content": "ping", "name": _name(tools[0])}], tools)
            if "<tool_call>" not in str(self._tokenizer.chat_template):
                raise ChatError(
                    "the chat template does not write tool calls as <tool_call>…</tool_call>, the only form read here; "
                    "expected the name of a renderer in model.renderer"
                )

    def _turn_end(self) -> int:
        """The token behind the assistant's content."""
        _, found, tail = self._written([_USER, _ASSISTANT], (), tokenize=False).rpartition(_ANSWER)
        if not found:
            raise ChatError("the chat template leaves out what the assistant said")
        marks = {*self._tokenizer.added_tokens_decoder, self._tokenizer.eos_token_id}
        tokens = self._tokenizer(tail, add_special_tokens=False)["input_ids"]
        end: int | None = next((token for token in tokens if token in marks), None)
        if end is None:
            raise ChatError(
                "the chat template ends the assistant's turn with no token of its own, so no engine could stop there"
            )
        return end

    def _end_of_first(
        self, messages: Sequence[Message], count: int, tools: Sequence[Message], whole: Sequence[int], start: int
    ) -> int:
        """Where the first `count` messages end in the tokens of `whole`.

        A template may refuse some beginnings, or write a message into the next one. It then ends where it starts.
        """
        try:
            tokens = self._apply(messages[:count], tools)
        except ChatError:
            return start
        return len(tokens) if start <= len(tokens) <= len(whole) and list(whole[: len(tokens)]) == tokens else start

    def _apply(self, messages: Sequence[Message], tools: Sequence[Message], *, turn_follows: bool = False) -> list[int]:
        return list(self._written(messages, tools, turn_follows=turn_follows))

    def _written(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        *,
        turn_follows: bool = False,
        tokenize: bool = True,
    ) -> Any:
        """Token ids, or text."""
        conversation: list[Any] = [dict(message) for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=turn_follows,
                tokenize=tokenize,
                return_dict=False,
            )
        except Exception as error:  # whatever a template's own code raises
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatError(f"the chat template refuses the conversation: {reason}") from error

    def _decoded(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _opening(answer: Message) -> list[Message]:
    """A conversation that `answer` may follow."""
    if answer["role"] != "tool":
        return [_USER, _ASSISTANT]
    call: dict[str, Any] = {"type": "function", "function": {"name": str(answer.get("name", "f")), "arguments": {}}}
    if "tool_call_id" in answer:
        call["id"] = answer["tool_call_id"]
    return [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _tool_call(body: str, closed: bool) -> ToolCall:
    problem = None if closed else "the call is not closed"
    try:
        found = json.loads(body)
    except ValueError as error:
        found, problem = None, problem or f"the call is not JSON: {error}"
    if isinstance(found, Mapping) and problem is None:
        name, arguments = found.get("name"), found.get("arguments", {})
        if isinstance(name, str) and name and isinstance(arguments, Mapping):
            return ToolCall(name=name, arguments=dict(arguments))
    return ToolCall(name="", arguments={}, problem=problem or "the call names no function with an object of arguments")


def _name(tool: Message) -> str:
    return str(tool["function"]["name"])
