"""Conversations by the library `renderers`, for the families of models that it knows.

The library writes tokens without a template's program, and appends turns to sampled tokens.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from millrace.chat.base import ChatRenderer, Rendered, ToolCall, Turn
from millrace.errors import ChatError, one_line
from millrace.prompts.packages import check_installed
from millrace.types import Message

EXTRA = "chat"
PACKAGE = "renderers"

_BY_MODEL_TYPE: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "gpt_oss": ("gpt-oss",),
    "llama": ("llama-3",),
    "minimax_m2": ("minimax-m2",),
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
}
"""`model_type` of config.json → the library's names of renderers that may fit. Whether one does, its tokens decide."""


class FamilyRenderer(ChatRenderer):
    """The library's renderer `family`, such as `qwen3`, over `tokenizer`.

    Raises InputError if the library is not installed, and ChatError if it knows no such family or the tokenizer
    has not the family's tokens.
    """

    def __init__(self, family: str, tokenizer: PreTrainedTokenizerBase) -> None:
        check_installed(PACKAGE, EXTRA, f"model.renderer {family}")
        import renderers
        from renderers.base import RENDERER_REGISTRY, _populate_registry

        _populate_registry()
        if family not in RENDERER_REGISTRY or family == "default":
            names = ", ".join(sorted(RENDERER_REGISTRY.keys() - {"default"}))
            raise ChatError(f'"{family}"', key="model.renderer", expected=f"auto, template, {names}")
        self.name = f"renderers' {family}"
        self._tokenizer = tokenizer
        try:
            # Sampled reasoning stays where it is: whatever drops it would have to write the turn again.
            config = renderers.config_from_name(family).model_copy(update={"thinking_retention": "all"})
            self._renderer: Any = renderers.create_renderer(tokenizer, config)
            self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())
        except Exception as error:
            raise ChatError(f"the renderer {family} does not fit the tokenizer: {one_line(error)}") from error

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Rendered:
        rendered = self._rendered(messages, tools, turn_follows=True)
        return Rendered(tuple(rendered.token_ids), _starts(rendered.message_indices, messages, 0))

    def write(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Sequence[int]:
        return tuple(self._rendered(messages, tools, turn_follows=False).token_ids)

    def next_turn(
        self, context: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> Rendered:
        bridged = self._renderer.bridge_to_next_turn(
            list(context), list(turn), list(messages), tools=list(tools) or None
        )
        sampled = [*context, *turn]
        if bridged is None or list(bridged.token_ids[: len(sampled)]) != sampled:
            raise ChatError(f"{self.name} can't continue after the turn without writing it again")
        starts = _starts(bridged.message_indices, messages, len(sampled))
        return Rendered(tuple(bridged.token_ids[len(sampled) :]), starts)

    def parse(self, turn: Sequence[int], context: Sequence[int], tools: Sequence[Message] = ()) -> Turn:
        parsed = self._renderer.parse_response(list(turn), tools=list(tools) or None, prompt_ids=list(context))
        calls = tuple(_call(call) for call in parsed.tool_calls)
        return Turn(content=parsed.content, reasoning=parsed.reasoning_content, tool_calls=calls)

    def check_several_turns(self, tools: Sequence[Message]) -> None:
        question = [{"role": "user", "content": "ping"}]
        # A turn that is still thinking can't be followed, so families that think get a thought that is over.
        for text, end in product(("pong", "<think></think>pong"), self.stop_token_ids):
            turn = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], end]
            with suppress(ChatError):
                self.next_turn(self.render(question, tools).tokens, turn, question, tools)
                return
        raise ChatError(f"{self.name} can't append another turn to the policy's")

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message], *, turn_follows: bool) -> Any:
        """The library's rendering, with `token_ids` and `message_indices`."""
        try:
            return self._renderer.render(list(messages), tools=list(tools) or None, add_generation_prompt=turn_follows)
        except Exception as error:
            raise ChatError(f"{self.name} refuses the conversation: {one_line(error)}") from error


def family_of(model_type: str, tokenizer: PreTrainedTokenizerBase) -> FamilyRenderer | None:
    """Returns the library's renderer that agrees with the tokenizer's own template; None if there is none."""
    if find_spec(PACKAGE) is None:
        return None
    for family in _BY_MODEL_TYPE.get(model_type, ()):
        with suppress(ChatError):
            renderer = FamilyRenderer(family, tokenizer)
            if all(renderer.render(messages).tokens == _templated(tokenizer, messages) for messages in _PROBES):
                return renderer
    return None


_PROBES: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "ping"},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "ping\n\n2 + 2"}),
    (
        {"role": "user", "content": "ping"},
        {"role": "assistant", "content": "pong"},
        {"role": "user", "content": "and again?"},
    ),
)


def _templated(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[int, ...]:
    conversation = [dict(message) for message in messages]
    return tuple(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))


def _starts(indices: Sequence[int], messages: Sequence[Message], first: int) -> tuple[tuple[str, int], ...]:
    """Where each message begins, counted from token `first`; marks between two messages belong to the earlier one."""
    messages_of = list(indices[first:])
    starts: list[tuple[str, int]] = []
    for number, message in enumerate(messages):
        start = messages_of.index(number) if number in messages_of else (starts[-1][1] if starts else 0)
        starts.append((str(message["role"]), start if starts else 0))
    end = len(messages_of)
    while end and messages_of[end - 1] < 0:
        end -= 1
    return (*starts, ("assistant", end))


def _call(call: Any) -> ToolCall:
    if call.status == "ok" and isinstance(call.arguments, dict):
        return ToolCall(name=call.name, arguments=call.arguments, id=call.id)
    problem = "the arguments are not an object" if call.status == "ok" else call.status.value.replace("_", " ")
    return ToolCall(name=call.name or "", arguments={}, problem=problem, id=call.id)
