"""Before a run starts: what a chat template leaves out is named, and text never becomes marks."""

from typing import Any

import pytest
from support.chat.tokenizers import FAMILIES, chat_tokenizer

from configs.task import PromptsConfig
from millrace.chat.base import ChatRenderer
from millrace.chat.completeness import CompletenessCheck
from millrace.chat.encoder import PromptEncoder
from millrace.chat.family import FamilyRenderer
from millrace.chat.template import TemplateRenderer
from millrace.errors import ChatError
from millrace.types import Demonstration, Message, Prompt

TOOL: Message = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
USER: Message = {"role": "user", "content": "add 1 and 2"}
CALLS: tuple[Message, ...] = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "3"},
)
CONTENT_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "content only": CONTENT_ONLY,
    "no system": CONTENT_ONLY.replace("in messages", "in messages if m.role != 'system'"),
    "no generation prompt": CONTENT_ONLY.partition("{% if add")[0],
    "no thoughts": CONTENT_ONLY.replace("m.content", "m.content.split('</think>')[-1]"),
    "marks of roles alone": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}",
}


def encoder_of(name: str, **prompts: Any) -> PromptEncoder:
    """An encoder of a family, or of one of `TEMPLATES` with the tokens of ChatML."""
    family = FAMILIES.get(name, FAMILIES["chatml"])
    tokenizer = chat_tokenizer(family)
    tokenizer.chat_template = TEMPLATES.get(name, tokenizer.chat_template)
    renderer: ChatRenderer = (
        TemplateRenderer(tokenizer) if family.template else FamilyRenderer(family.renderer, tokenizer)
    )
    return PromptEncoder(tokenizer, PromptsConfig(**prompts), renderer=renderer)


def prompt_of(*messages: Message, turns: tuple[Message, ...] = (), tools: tuple[Message, ...] = ()) -> Prompt:
    shown = Demonstration(messages=turns) if turns else None
    return Prompt(prompt_id="p:1", text="", answer="", source="p", messages=messages, tools=tools, demonstration=shown)


def thinking(content: str, **keys: str) -> Message:
    return {"role": "assistant", "content": content, **keys}


@pytest.mark.parametrize(
    ("name", "prompt", "part"),
    [
        ("no system", prompt_of({"role": "system", "content": "add"}, USER), "content of the system"),
        ("content only", prompt_of(USER, tools=(TOOL,)), "the name of a tool"),
        # The tool's name is in the user's words and in the list of tools.
        ("content only", prompt_of(USER, turns=CALLS), "of a tool call"),
        ("content only", prompt_of(USER, turns=(thinking("3", reasoning="1 + 2"),)), "reasoning of the assistant"),
        ("no thoughts", prompt_of(USER, turns=(thinking("<think>1 + 2</think>3"),)), "the thought in content"),
        ("no thoughts", prompt_of(USER, thinking("<think>1 + 2</think>3"), USER), "the thought in content"),
        ("no generation prompt", prompt_of(USER), "the generation prompt"),
        ("marks of roles alone", prompt_of(USER), "the generation prompt"),
    ],
)
def test_what_a_template_leaves_out_is_named(name: str, prompt: Prompt, part: str) -> None:
    with pytest.raises(ChatError) as caught:
        CompletenessCheck(encoder_of(name)).check(prompt, demonstrates=bool(prompt.demonstration))
    assert caught.value.file == "prompt p:1"
    assert part in caught.value.read
    assert "\n" not in str(caught.value)


def test_the_system_prompt_and_the_tools_of_the_run_are_looked_for_too() -> None:
    for name, encoder in (
        ("content of the system", encoder_of("no system", system_prompt="Be brief.")),
        (
            "the name of a tool",
            PromptEncoder(
                encoder_of("content only").tokenizer,
                PromptsConfig(),
                renderer=encoder_of("content only").renderer,
                tools=[TOOL],
            ),
        ),
    ):
        with pytest.raises(ChatError) as caught:
            CompletenessCheck(encoder).check(prompt_of(USER), demonstrates=False)
        assert name in caught.value.read


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama-3", "glm-4.5"])
def test_families_with_tools_leave_nothing_out(name: str) -> None:
    check = CompletenessCheck(encoder_of(name, system_prompt="Be brief.", response_prefix="3"))
    check.check(prompt_of(USER, *CALLS, USER, tools=(TOOL,)), demonstrates=False)
    if name != "glm-4.5":  # Its turns end with the mark of the next one.
        check.check(prompt_of(USER, turns=CALLS, tools=(TOOL,)), demonstrates=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plain_conversation_is_complete_in_every_family(name: str) -> None:
    turns = (thinking("pong"), USER, thinking("pong"))
    CompletenessCheck(encoder_of(name)).check(prompt_of(USER, turns=turns), demonstrates=name != "glm-4.5")


def test_each_shape_is_tried_once_whatever_its_texts() -> None:
    check, wrong = CompletenessCheck(encoder_of("no generation prompt")), prompt_of(USER)
    with pytest.raises(ChatError):
        check.check(wrong, demonstrates=False)
    check.check(prompt_of({"role": "user", "content": "another"}), demonstrates=False)


@pytest.mark.parametrize(
    ("name", "mark"),
    [("chatml", "<|im_end|>"), ("qwen3", "<|im_start|>"), ("llama-3", "<|eot_id|>"), ("mistral", "[/INST]")],
)
def test_marks_in_anybody_s_text_are_refused(name: str, mark: str) -> None:
    encoder, text = encoder_of(name), f"the mark {mark} ends a turn"
    tool = {"type": "function", "function": {"name": "add", "description": text}}
    for prompt in (
        prompt_of({"role": "user", "content": text}),
        prompt_of({"role": "system", "content": text}, USER),
        prompt_of(USER, thinking(text), USER),
        prompt_of(USER, tools=(tool,)),
        prompt_of(USER, turns=(thinking(text),)),
    ):
        with pytest.raises(ChatError) as caught:
            encoder.encode(prompt)
            encoder.demonstrate(prompt)
        assert caught.value.file == "prompt p:1"
        assert mark in caught.value.read


def test_a_thought_and_other_brackets_are_no_marks() -> None:
    encoder = encoder_of("qwen3")
    text = "Think in <think> and </think>; a < b | c > d."
    assert text in encoder.tokenizer.decode(list(encoder.encode(prompt_of({"role": "user", "content": text})).tokens))


def test_a_plain_response_that_holds_an_end_token_is_refused() -> None:
    encoder = PromptEncoder(chat_tokenizer(FAMILIES["chatml"]), PromptsConfig())
    with pytest.raises(ChatError) as caught:
        encoder.demonstrate(prompt_of(turns=(thinking("The mark <|im_end|> ends a turn"),)))
    assert caught.value.file == "prompt p:1"
