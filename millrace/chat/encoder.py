"""A prompt as tokens.

text ────────────────────► prompts.template ─► tokenizer ──────────────────────────┐
text (prompts.chat) ─► user's message ─┐                                           ├─► tokens, and which message
messages ──────────────────────────────┴─► system prompt ─► renderer ─► the        │   each of them belongs to
                                           tools               beginning of the ───┘
                                                               assistant's turn
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from configs.schema import ModelConfig
from configs.task import PromptsConfig
from millrace.chat.base import THOUGHT_BEGIN, THOUGHT_END, ChatRenderer, Rendered
from millrace.chat.family import FamilyRenderer, family_of
from millrace.chat.template import TemplateRenderer
from millrace.errors import ChatError, InputError
from millrace.models.loading import end_token_ids, load_tokenizer
from millrace.prompts.messages import checked_tools, templated
from millrace.types import Demonstration, Message, Prompt, Response


class PromptEncoder:
    """Makes tokens of prompts, for generation and evaluation alike."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: PromptsConfig,
        *,
        renderer: ChatRenderer | None = None,
        tools: Sequence[Message] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """`stop_token_ids` end a response of the model, as those of the renderer do; without any, the tokenizer's
        end-of-sequence token does."""
        self.tokenizer = tokenizer
        self.renderer = renderer
        """Writes conversations; None if the run's prompts are plain text."""
        self.tools = tuple(tools)
        """The functions that the policy may call in every conversation."""
        ends = [*(stop_token_ids or [tokenizer.eos_token_id]), *(renderer.stop_token_ids if renderer else ())]
        self.stop_token_ids = tuple(dict.fromkeys(ends))
        """Tokens that end a response."""
        self._marks = _marks(tokenizer, renderer, self.stop_token_ids)
        self._prompts = prompts
        prefix = prompts.response_prefix
        self._prefix = [] if prefix is None else tokenizer(prefix, add_special_tokens=False)["input_ids"]

    def encode(self, prompt: Prompt) -> Rendered:
        """The prompt's tokens. Raises ChatError, naming the prompt, if its conversation can't be written."""
        if self.renderer is None:
            return Rendered(self._text_tokens(templated(self._prompts.template, prompt.text)))
        messages, tools = self.messages_of(prompt), self.tools_of(prompt)
        with _naming(prompt):
            self.refuse_marks((*messages, *tools))
            tokens, starts = self.renderer.render(messages, tools)
        return Rendered((*tokens, *self._prefix), starts)

    def demonstrate(self, prompt: Prompt) -> Response:
        """The response that the prompt's source demonstrates, after the tokens of `encode`. Its log μ are 0.

        Messages between the assistant's turns belong to an environment, and so do turns that are not learned. Raises
        ChatError, naming the prompt, if the conversation can't be written turn after turn.
        """
        shown = prompt.demonstration
        assert shown is not None
        spans = shown.environment_spans
        starts: tuple[tuple[str, int], ...] = ()
        if shown.tokens:
            tokens = shown.tokens
        elif self.renderer is None:
            text = str(shown.messages[0]["content"])
            tokens = (*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.stop_token_ids[0])
            if set(tokens[:-1]) & set(self.stop_token_ids):
                read = "its demonstration holds a token that ends a response"
                raise ChatError(read, file=f"prompt {prompt.prompt_id}", expected="text without it; it is appended")
        else:
            with _naming(prompt):
                self.refuse_marks(shown.messages)
                tokens, spans, starts = self._turns(prompt, shown, self.renderer)
        return Response(
            tokens=tokens,
            rollout_logprobs=(0.0,) * len(tokens),
            version_spans=(),
            finish_reason="stop",
            environment_spans=spans,
            message_starts=starts,
        )

    def refuse_marks(self, messages: Sequence[Message]) -> None:
        """Raises ChatError if text of `messages`, or of descriptions of tools, would become a mark between messages."""
        for message in messages:
            if (found := self._marks.search(json.dumps(message, ensure_ascii=False))) is not None:
                owner = f"the {message['role']}'s message" if "role" in message else "a tool"
                read = f'{owner} holds "{found[0]}", which the tokenizer takes for a mark between messages'
                raise ChatError(read, expected="text without it")

    def _text_tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of plain text, with those that the tokenizer puts before it, once, and none that it appends."""
        encoded = self.tokenizer(text, return_special_tokens_mask=True)
        ids, added = encoded["input_ids"], encoded["special_tokens_mask"]
        begin = tuple(ids[: [*added, 0].index(0)])
        tokens = tuple(token for token, is_added in zip(ids, added, strict=True) if not is_added)
        return tokens if tokens[: len(begin)] == begin else (*begin, *tokens)

    def messages_of(self, prompt: Prompt) -> tuple[Message, ...]:
        """The conversation before the policy's turn, with the run's system prompt."""
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        system = self._prompts.system_prompt
        if system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        return messages

    def _turns(
        self, prompt: Prompt, shown: Demonstration, renderer: ChatRenderer
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[tuple[str, int], ...]]:
        """Tokens, environment spans and message starts of a response of several messages, each as in `Response`.

        Turns follow each other as those do that a policy samples: none is written anew.
        """
        tools, conversation = self.tools_of(prompt), (*self.messages_of(prompt), *shown.messages)
        context = self.encode(prompt).tokens
        first = known = len(conversation) - len(shown.messages)
        turn = self._turn(conversation[: known + 1], context, tools, renderer)
        tokens, spans, starts = turn, list[tuple[int, int]](), list[tuple[str, int]]()
        for number in range(known + 1, len(conversation)):
            if conversation[number]["role"] != "assistant":
                continue
            before = (*context, *tokens[: len(tokens) - len(turn)])
            between = renderer.next_turn(before, turn, conversation[known + 1 : number], tools)
            masked = spans.pop()[0] if spans and spans[-1][1] == len(tokens) else len(tokens)
            starts += [(role, len(tokens) + at) for role, at in between.message_starts]
            opened = renderer.render(conversation[:number], tools).tokens
            turn = self._turn(conversation[: number + 1], opened, tools, renderer)
            tokens, known = (*tokens, *between.tokens, *turn), number
            spans.append((masked, len(tokens) - (0 if number - first in shown.unlearned else len(turn))))
        return tokens, tuple(spans), tuple(starts)

    def _turn(
        self, conversation: Sequence[Message], opened: Sequence[int], tools: Sequence[Message], renderer: ChatRenderer
    ) -> tuple[int, ...]:
        """The tokens of the last message of a conversation, the assistant's, after those that open its turn."""
        written = tuple(renderer.write(conversation, tools))
        # Where an engine would stop; templates may write more behind it.
        end = next((i for i in range(len(opened), len(written)) if written[i] in self.stop_token_ids), None)
        if written[: len(opened)] != tuple(opened) or end is None:
            raise ChatError(
                f"{renderer.name} does not write the assistant's turn as it begins one, or without an end token",
                expected="one that does, and text that begins as prompts.response_prefix",
            )
        return written[len(opened) : end + 1]

    def tools_of(self, prompt: Prompt) -> tuple[Message, ...]:
        """The functions that the policy may call when it answers `prompt`."""
        return (*self.tools, *prompt.tools)


@contextmanager
def _naming(prompt: Prompt) -> Iterator[None]:
    """Has the errors of renderers name the prompt."""
    try:
        yield
    except ChatError as error:
        raise ChatError(error.read, file=f"prompt {prompt.prompt_id}", expected=error.expected) from error


def load_run_tokenizer(folder: Path, model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model in `folder`, with the run's chat template. Raises InputError as `load_encoder`."""
    return load_tokenizer(folder, read_text(model.chat_template, "model.chat_template"))


def load_encoder(
    folder: Path, model: ModelConfig, prompts: PromptsConfig, tools: Sequence[Message], *, chat: bool
) -> PromptEncoder:
    """The encoder for the model in `folder`; `tools` are functions that the run's environment offers.

    `chat`: whether prompts are conversations. Raises ChatError if they are and the model has no chat template that can
    be used, and InputError for bad files that the config names.
    """
    tokenizer = load_run_tokenizer(folder, model)
    run_tools = read_text(prompts.tools, "prompts.tools")
    return PromptEncoder(
        tokenizer,
        prompts,
        renderer=_renderer(folder, model, tokenizer) if chat else None,
        tools=(*tools, *(() if run_tools is None else checked_tools(run_tools, f"prompts.tools {prompts.tools}"))),
        stop_token_ids=end_token_ids(folder, tokenizer),
    )


def is_chat(config: PromptsConfig, prompts: Sequence[Prompt]) -> bool:
    """Whether `prompts` are conversations: all are or none. Raises InputError for a mixture."""
    texts = [prompt for prompt in prompts if not prompt.messages]
    if config.chat or (prompts and not texts):
        return True
    if len(texts) < len(prompts):
        read = f"text, and {len(prompts) - len(texts)} others are lists of messages"
        raise InputError(read, key=f"prompt {texts[0].prompt_id}", expected="all alike, or prompts.chat")
    return False


def _marks(tokenizer: PreTrainedTokenizerBase, renderer: ChatRenderer | None, ends: Sequence[int]) -> re.Pattern[str]:
    """Matches what messages must not hold: special tokens, and others that end a turn or stand around one."""
    used = {*ends, *(renderer.render([{"role": "user", "content": "ping"}]).tokens if renderer else ())}
    added = tokenizer.added_tokens_decoder.items()
    marks = {token.content for number, token in added if token.special or number in used}
    # Data may hold thoughts, and some vocabularies hold line breaks as added tokens.
    texts = sorted(mark for mark in marks - {THOUGHT_BEGIN, THOUGHT_END} if mark.strip())
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _renderer(folder: Path, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
    try:
        if model.renderer == "template":
            return TemplateRenderer(tokenizer)
        if model.renderer != "auto":
            return FamilyRenderer(model.renderer, tokenizer)
        config: Mapping[str, object] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        family = family_of(str(config.get("model_type")), tokenizer) if tokenizer.chat_template else None
        return family or TemplateRenderer(tokenizer)
    except ChatError as error:
        raise ChatError(error.read, file=folder, key=error.key, expected=error.expected) from error


def read_text(path: str | Path | None, key: str) -> str | None:
    """The text of the file that `key` names; None if it names none. Raises InputError if it can't be read."""
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f'"{path}", which can\'t be read ({error})', key=key, expected="a text file") from error
