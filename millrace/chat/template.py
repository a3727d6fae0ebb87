"""Conversations by the tokenizer's own chat template, for families that no renderer of the library knows.

    [user A] [assistant X]              ─► template ─► … X <end>\\n
    [user A] [assistant X] [tool T] +   ─► template ─► … X <end>\\n  <tool> T <end> <assistant>
                                                            └──────────────┬──────────────┘
                                       appended after the sampled tokens, which end with <end>

A template is a program, so its output for a stand-in conversation is compared with that for a longer one:
only if the shorter is the beginning of the longer can turns be appended.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from millrace.chat.base import THOUGHT_BEGIN, THOUGHT_END, ChatRenderer, Rendered, ToolCall, Turn
from millrace.errors import ChatError, one_line
from millrace.types import Message

_USER: Message = {"role": "user", "content": "ping"}
_ANSWER = "pong"
_ASSISTANT: Message = {"role": "assistant", "content": _ANSWER}
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class TemplateRenderer(ChatRenderer):
    """The chat template of `tokenizer`. Raises ChatError if it has none, or one that ends no turn with a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            expected = "one there, or a file in model.chat_template"
            raise ChatError("the tokenizer has no chat template", expected=expected)
        self.name = "the tokenizer's chat template"
        self._tokenizer = tokenizer
        self._end = self._turn_end()
        self.stop_token_ids = (self._end,)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Rendered:
        tokens = self._apply(messages, tools, turn_follows=True)
        return Rendered(tuple(tokens), self._starts(messages, tools, tokens))

    def write(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Sequence[int]:
        return self._apply(messages, tools)

    def next_turn(
        self, context: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> Rendered:
        opening = _opening(messages[0])
        first = self._apply(opening, tools)
        conversation = [*opening, *messages]
        whole = self._apply(conversation, tools, turn_follows=True)
        if whole[: len(first)] != first:
            raise ChatError(f"the chat template writes earlier turns anew when the {messages[0]['role']} answers")
        # Behind the end of the assistant's turn. If the policy ended it otherwise, that end is written for it.
        end = len(first) - first[::-1].index(self._end)
        if turn[-1] != self._end:
            end -= 1
        return Rendered(tuple(whole[end:]), self._starts(conversation, tools, whole, len(opening), end))

    def parse(self, turn: Sequence[int], context: Sequence[int], tools: Sequence[Message] = ()) -> Turn:
        special = {self._tokenizer.eos_token_id, self._end}
        kept = [token for token in turn if token not in special]
        text = str(self._tokenizer.decode(kept, clean_up_tokenization_spaces=False))
        thought, end, said = text.rpartition(THOUGHT_END)
        calls = tuple(_tool_call(body, bool(closed)) for body, closed in _CALL.findall(said)) if tools else ()
        return Turn(
            content=(_CALL.sub("", said) if tools else said).strip(),
            reasoning=thought.replace(THOUGHT_BEGIN, "").strip() if end else None,
            tool_calls=calls,
        )

    def check_several_turns(self, tools: Sequence[Message]) -> None:
        prompt = self._apply([_USER], tools, turn_follows=True)
        answered = self._apply([_USER, _ASSISTANT], tools)
        if answered[: len(prompt)] != prompt:
            raise ChatError(
                "the chat template writes a finished turn of the assistant otherwise than it begins one, so the tokens "
                "of several turns would not be those that were sampled"
            )
        result = {**_USER, "role": "tool", "name": str(tools[0]["function"]["name"])} if tools else None
        for answer in filter(None, (_USER, result)):
            added = self.next_turn([], [self._end], [answer], tools).tokens
            if answer["content"] not in self._tokenizer.decode(list(added)):
                raise ChatError(f"the chat template leaves out what the {answer['role']} answers")
        if tools and "<tool_call>" not in str(self._tokenizer.chat_template):
            raise ChatError(
                "the chat template does not write tool calls as <tool_call>…</tool_call>, the only form read here",
                expected="the name of a renderer in model.renderer",
            )

    def _turn_end(self) -> int:
        """The token behind the assistant's content."""
        _, answer, tail = self._written([_USER, _ASSISTANT], (), tokenize=False).rpartition(_ANSWER)
        if not answer:
            raise ChatError("the chat template omits the assistant's content")
        marks = {*self._tokenizer.added_tokens_decoder, self._tokenizer.eos_token_id}
        tokens = self._tokenizer(tail, add_special_tokens=False)["input_ids"]
        end: int | None = next((token for token in tokens if token in marks), None)
        if end is None:
            raise ChatError(
                "the chat template ends the assistant's turn without a special token, so no engine could stop there"
            )
        return end

    def _starts(
        self, messages: Sequence[Message], tools: Sequence[Message], whole: Sequence[int], skipped: int = 0, at: int = 0
    ) -> tuple[tuple[str, int], ...]:
        """(role, first token) of each message behind the `skipped` ones, which end at token `at`; counted from there.

        A template may refuse some beginnings of a conversation, or write a message into the next one. Such a message
        ends where it starts.
        """
        starts, start = [], at
        for number in range(skipped, len(messages)):
            starts.append((str(messages[number]["role"]), start - at))
            with contextlib.suppress(ChatError):
                tokens = self._apply(messages[: number + 1], tools)
                if len(tokens) >= start and list(whole[: len(tokens)]) == tokens:
                    start = len(tokens)
        return (*starts, ("assistant", start - at))

    def _apply(self, messages: Sequence[Message], tools: Sequence[Message], *, turn_follows: bool = False) -> list[int]:
        return list(self._written(messages, tools, add_generation_prompt=turn_follows, return_dict=False))

    def _written(self, messages: Sequence[Message], tools: Sequence[Message], **options: Any) -> Any:
        """Token ids, or text with `tokenize=False`."""
        conversation: list[Any] = [dict(message) for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                conversation, tools=[dict(tool) for tool in tools] or None, **options
            )
        except Exception as error:  # whatever a template's own code raises
            raise ChatError(f"the chat template refuses the conversation: {one_line(error)}") from error


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
        call = json.loads(body)
    except ValueError as error:
        call, problem = None, problem or f"the call is not JSON: {error}"
    if isinstance(call, Mapping) and problem is None:
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(name, str) and name and isinstance(arguments, Mapping):
            return ToolCall(name=name, arguments=dict(arguments))
    return ToolCall(name="", arguments={}, problem=problem or "the call names no function with an object of arguments")
