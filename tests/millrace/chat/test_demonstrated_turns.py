"""Demonstrated conversations as tokens: the assistant's turns are learned, and what others say is not."""

from dataclasses import replace
from typing import Any

import pytest
from support.chat.tokenizers import FAMILIES, chat_tokenizer

from configs.task import PromptsConfig
from millrace.chat.base import ChatRenderer
from millrace.chat.encoder import PromptEncoder
from millrace.chat.family import FamilyRenderer
from millrace.chat.template import TemplateRenderer
from millrace.errors import ChatError
from millrace.types import Demonstration, Message, Prompt, Response

ASKED: tuple[Message, ...] = ({"role": "user", "content": "ping"},)
TURNS: tuple[Message, ...] = (
    {"role": "assistant", "content": "pong"},
    {"role": "user", "content": "and again?"},
    {"role": "assistant", "content": "pong, pong"},
)
REWRITING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content if loop.last else '…' }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that shortens all messages but the last."""


def encoder_of(name: str, template: str | None = None, **prompts: Any) -> PromptEncoder:
    family = FAMILIES[name]
    tokenizer = chat_tokenizer(family)
    if template is not None:
        tokenizer.chat_template = template
    renderer: ChatRenderer = (
        TemplateRenderer(tokenizer) if family.template else FamilyRenderer(family.renderer, tokenizer)
    )
    return PromptEncoder(tokenizer, PromptsConfig(**prompts), renderer=renderer)


def demonstrated(turns: tuple[Message, ...] = TURNS, asked: tuple[Message, ...] = ASKED) -> Prompt:
    shown = Demonstration(messages=turns)
    return Prompt(prompt_id="p", text="ping", answer="", source="test", messages=asked, demonstration=shown)


def pieces(encoder: PromptEncoder, response: Response) -> tuple[str, str]:
    """The text that is learned, and the text that is not."""
    decode = encoder.tokenizer.decode
    pairs = list(zip(response.tokens, response.loss_mask, strict=True))
    return str(decode([token for token, mask in pairs if mask])), str(
        decode([token for token, mask in pairs if not mask])
    )


@pytest.mark.parametrize("name", ["chatml", "gemma", "mistral", "phi", "granite", "olmo", "qwen3", "llama-3"])
def test_the_turns_with_their_end_tokens_are_learned_and_nothing_else(name: str) -> None:
    encoder = encoder_of(name)
    prompt = demonstrated()
    response = encoder.demonstrate(prompt)
    learned, between = pieces(encoder, response)
    end = str(encoder.tokenizer.decode([response.tokens[-1]]))
    assert response.tokens[-1] in encoder.stop_token_ids
    # Some families begin a finished turn with a space, others with an empty thought.
    assert learned.count(end) == 2
    assert [turn.strip().rpartition("\n")[2] for turn in learned.split(end)[:2]] == ["pong", "pong, pong"]
    assert "and again?" in between
    assert "pong" not in between
    assert [role for role, _ in response.message_starts] == ["user", "assistant"]
    assert response.rollout_logprobs == (0.0,) * len(response.tokens)


@pytest.mark.parametrize("name", ["chatml", "gemma", "mistral", "phi", "granite", "olmo", "llama-3"])
def test_prompt_and_turns_together_are_what_the_template_writes(name: str) -> None:
    encoder = encoder_of(name)
    assert encoder.renderer is not None
    whole = (*encoder.encode(demonstrated()).tokens, *encoder.demonstrate(demonstrated()).tokens)
    assert tuple(encoder.renderer.write((*ASKED, *TURNS)))[: len(whole)] == whole


def test_a_turn_that_is_excluded_is_read_and_not_learned() -> None:
    encoder = encoder_of("chatml")
    prompt = demonstrated((*TURNS, *TURNS[1:]))
    whole = encoder.demonstrate(prompt)
    assert prompt.demonstration is not None
    response = encoder.demonstrate(replace(prompt, demonstration=replace(prompt.demonstration, unlearned=(2,))))
    assert response.tokens == whole.tokens
    assert pieces(encoder, response)[0] == "pong<|im_end|>pong, pong<|im_end|>"
    ((start, end),) = response.environment_spans
    assert (start, end) == (whole.environment_spans[0][0], whole.environment_spans[1][1])


def test_a_system_prompt_and_a_beginning_of_the_response_are_part_of_the_prompt() -> None:
    encoder = encoder_of("chatml", system_prompt="Be brief.", response_prefix="po")
    prompt = demonstrated()
    assert "Be brief." in str(encoder.tokenizer.decode(encoder.encode(prompt).tokens))
    assert pieces(encoder, encoder.demonstrate(prompt))[0].startswith("ng<|im_end|>")


def test_a_template_that_writes_earlier_messages_anew_is_refused() -> None:
    encoder = encoder_of("chatml", REWRITING)
    with pytest.raises(ChatError) as caught:
        encoder.demonstrate(demonstrated())
    assert caught.value.file == "prompt p"


def test_without_a_chat_template_the_text_and_an_end_token_are_learned() -> None:
    tokenizer = chat_tokenizer(FAMILIES["chatml"])
    encoder = PromptEncoder(tokenizer, PromptsConfig())
    response = encoder.demonstrate(demonstrated(TURNS[:1], ()))
    assert tokenizer.decode(response.tokens) == f"pong{tokenizer.eos_token}"
    assert set(response.loss_mask) == {1}


def test_the_tokens_of_a_stored_rollout_are_learned_as_they_are() -> None:
    shown = Demonstration(tokens=(5, 6, 7, 8), environment_spans=((1, 3),))
    prompt = Prompt(prompt_id="p", text="ping", answer="", source="test", demonstration=shown)
    response = encoder_of("chatml").demonstrate(prompt)
    assert (response.tokens, response.loss_mask) == ((5, 6, 7, 8), [1, 0, 0, 1])
