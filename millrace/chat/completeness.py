"""Finds parts of conversations that a chat template leaves out, before a run starts.

conversation ─► words that occur nowhere else, in place of its texts ─► tokens ─► text: is every word there?
"""

from dataclasses import replace
from typing import Any

from configs.task import PromptsConfig
from millrace.chat.base import THOUGHT_BEGIN, THOUGHT_END, ChatRenderer
from millrace.chat.encoder import PromptEncoder
from millrace.errors import ChatError
from millrace.prompts.messages import REASONING
from millrace.types import Demonstration, Message, Prompt


class CompletenessCheck:
    """Tries each shape of conversation once, as `encoder` writes it."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder, ends = encoder, encoder.stop_token_ids
        # Words stand for the run's system prompt and tools too, and do not begin with its response prefix.
        self._bare = PromptEncoder(encoder.tokenizer, PromptsConfig(), renderer=encoder.renderer, stop_token_ids=ends)
        self._tried: set[tuple[str, ...]] = set()

    def check(self, prompt: Prompt, *, demonstrates: bool) -> None:
        """Raises ChatError for a part of the prompt, and of its demonstration if it is learned, that has no tokens."""
        if (renderer := self.encoder.renderer) is None:
            return
        shown = prompt.demonstration.messages if demonstrates and prompt.demonstration is not None else ()
        asked, words = self.encoder.messages_of(prompt), dict[str, str]()
        messages = tuple(_in_words(message, words) for message in (*asked, *shown))
        tools = tuple(_with_name(tool, words, "the name of a tool") for tool in self.encoder.tools_of(prompt))
        if (shape := tuple(words.values())) in self._tried:
            return
        self._tried.add(shape)
        asked, turns = messages[: len(asked)], messages[len(asked) :]
        stand_in = replace(prompt, messages=asked, tools=tools, demonstration=Demonstration(messages=turns))
        tokens = (*self._bare.encode(stand_in).tokens, *(self._bare.demonstrate(stand_in).tokens if turns else ()))
        text = str(self.encoder.tokenizer.decode(list(tokens)))
        left_out = [part for word, part in words.items() if word not in text]
        if left_out or not self._opens_turn(renderer, stand_in):
            read = f"{renderer.name} leaves out {(*left_out, 'the generation prompt')[0]}"
            expected = "a template that writes it (model.chat_template), or data without it"
            raise ChatError(read, file=f"prompt {prompt.prompt_id}", expected=expected)

    def _opens_turn(self, renderer: ChatRenderer, prompt: Prompt) -> bool:
        """Whether the assistant's turn is opened by the prompt, or by nothing, as Mistral's is."""
        opened = renderer.render(prompt.messages, prompt.tools).tokens
        if opened != tuple(renderer.write(prompt.messages, prompt.tools)):
            return True
        written = renderer.write((*prompt.messages, {"role": "assistant", "content": "answer"}), prompt.tools)
        return not str(self.encoder.tokenizer.decode(list(written[len(opened) :]))).partition("answer")[0].strip()


def _in_words(message: Message, words: dict[str, str]) -> Message:
    """The message with a word for each text. `words` gets each word with the part that it stands for."""
    role, changed = message["role"], dict(message)
    for key in ("content", *REASONING):
        if text := message.get(key):
            changed[key] = _word(words, f"{key} of the {role}")
            if THOUGHT_END in text:
                thought = _word(words, f"the thought in {key} of the {role}")
                changed[key] = f"{THOUGHT_BEGIN}\n{thought}\n{THOUGHT_END}\n\n{changed[key]}"
    calls: list[Any] = []
    for call in message.get("tool_calls", ()):
        arguments = {key: _word(words, "an argument of a tool call") for key in call["function"]["arguments"]}
        calls.append(_with_name(call, words, "the name in a tool call", arguments=arguments))
    return {**changed, "tool_calls": calls} if calls else changed


def _with_name(called: Message, words: dict[str, str], part: str, **changes: Any) -> Message:
    return {**called, "function": {**called["function"], "name": _word(words, part), **changes}}


def _word(words: dict[str, str], part: str) -> str:
    word = f"word{len(words)}end"
    words[word] = part
    return word
