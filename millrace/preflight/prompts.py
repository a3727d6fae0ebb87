"""Checks whether every prompt can be put to the model, and its answer scored, before anything of a run exists.

    plain text, and a plain tokenizer ─► the library `tokenizers`                                       milliseconds
    anything else ──stdin: model, prompts──► python -m millrace.preflight.prompts ─► transformers       some seconds
                          ▲                              │
                          └── longest, or one sentence ──┘ stdout

The child process keeps transformers out of the parent, which does not need it otherwise.
"""

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from tokenizers import Tokenizer

from configs.prompts import EnvironmentConfig, PromptsConfig
from configs.schema import ModelConfig
from millrace.errors import ChatError, InputError, PromptsError
from millrace.models.decoder import plain_tokenizer
from millrace.preflight.child import answer_of, serve
from millrace.prompts.dataset import PromptSet
from millrace.prompts.messages import templated
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt

if TYPE_CHECKING:
    from millrace.chat.encoder import PromptEncoder

_LONGEST_SECONDS = 10
"""For one prompt: writing it takes milliseconds."""
_ONLY_CHAT = ("system_prompt", "response_prefix", "tools")


def check_prompts(
    model: ModelConfig,
    prompts: PromptsConfig,
    environment: EnvironmentConfig,
    asked: PromptSet,
    *,
    context: int | None,
    max_new_tokens: int,
    vocab_size: int | None = None,
    ask: Callable[[str, Any, str], Any] = answer_of,
) -> int | None:
    """The length of the longest prompt, tokens; None if bootstrap has still to make the tokenizer.

    `context` and `vocab_size` are the model's, tokens; None if its config does not say. `ask` starts the child process.
    Raises InputError about the first prompt that the model can't be asked: its conversation
    can't be written or continued, the model does not know its tokens, or it leaves no room for a response.
    """
    if model.path is None:
        _refuse_chat_with_a_bootstrapped_model(prompts, asked)
        return None
    tokenizer = _plain(model, prompts, environment, asked)
    if tokenizer is not None:
        every = (*asked.train, *asked.eval)
        encoded = tokenizer.encode_batch([templated(prompts.template, prompt.text) for prompt in every])
        return _longest_that_fits(every, (one.ids for one in encoded), context, max_new_tokens, vocab_size)
    question = {
        "model": model.model_dump(),
        "prompts": prompts.model_dump(),
        "environment": environment.model_dump(),
        "train": [asdict(prompt) for prompt in asked.train],
        "eval": [asdict(prompt) for prompt in asked.eval],
        "context": context,
        "vocab_size": vocab_size,
        "max_new_tokens": max_new_tokens,
    }
    longest: int = ask("millrace.preflight.prompts", question, "the prompts")
    return longest


def longest_prompt(question: Mapping[str, Any]) -> int:
    """What `check_prompts` returns and raises, for what it writes to the child process. Imports transformers."""
    from millrace.generation.environments.base import environment_class
    from millrace.generation.environments.episodes import prompt_encoder

    model, prompts = ModelConfig(**question["model"]), PromptsConfig(**question["prompts"])
    train, held_out = (tuple(Prompt.from_json(one) for one in question[half]) for half in ("train", "eval"))
    asked = PromptSet(train=train, eval=held_out)
    name = question["environment"]["name"]
    environment = environment_class(name)
    assert model.path is not None
    encoder = prompt_encoder(Path(model.path).expanduser(), model, prompts, asked, environment)
    if encoder.renderer is None:
        if unused := [f"prompts.{key}" for key in _ONLY_CHAT if getattr(prompts, key) is not None]:
            raise InputError(
                key=unused[0], read="set and the prompts are plain text", expected="prompts.chat: true with it"
            )
    elif prompts.template is not None:
        raise InputError(
            key="prompts.template",
            read=f"set and the prompts are conversations, which {encoder.renderer.name} writes",
            expected="null",
        )
    elif environment is not None:
        try:
            encoder.renderer.check_several_turns(encoder.tools)
        except ChatError as error:
            raise ChatError(key="environment.name", read=f"{name}, and {error}") from error
    every = (*asked.train, *asked.eval)
    encoded = (_encode(encoder, prompt) for prompt in every)
    return _longest_that_fits(
        every, encoded, question["context"], question["max_new_tokens"], question.get("vocab_size")
    )


def _encode(encoder: "PromptEncoder", prompt: Prompt) -> Sequence[int]:
    """The prompt's tokens. Raises ChatError for a chat template that does not come to an end."""

    def give_up(signal_number: int, frame: FrameType | None) -> NoReturn:
        raise ChatError(
            file=f"prompt {prompt.prompt_id}",
            read=f"the chat template has not written it within {_LONGEST_SECONDS} s",
            expected="one that ends",
        )

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_LONGEST_SECONDS)
    try:
        return encoder.encode(prompt).tokens
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _plain(
    model: ModelConfig, prompts: PromptsConfig, environment: EnvironmentConfig, asked: PromptSet
) -> Tokenizer | None:
    """The model's tokenizer if nothing else is needed to make tokens of these prompts."""
    special = [prompts.chat, model.chat_template, environment.name, *(getattr(prompts, key) for key in _ONLY_CHAT)]
    if any(special) or any(prompt.messages for prompt in (*asked.train, *asked.eval)):
        return None
    assert model.path is not None
    return plain_tokenizer(Path(model.path).expanduser())


def _longest_that_fits(
    prompts: Sequence[Prompt],
    encoded: Iterable[Sequence[int]],
    context: int | None,
    max_new_tokens: int,
    vocab_size: int | None,
) -> int:
    def refused(prompt: Prompt, read: str, expected: str) -> InputError:
        return InputError(file=f"prompt {prompt.prompt_id}", read=read, expected=expected)

    longest = 0
    for prompt, tokens in zip(prompts, encoded, strict=True):
        length = len(tokens)
        if length == 0:
            raise refused(prompt, "it has no tokens", "text that the tokenizer knows")
        if vocab_size is not None and max(tokens, default=0) >= vocab_size:
            read = f"it holds token {max(tokens)} of the tokenizer, and the model knows {vocab_size} tokens"
            raise refused(prompt, read, "a tokenizer of the model's own")
        if context is not None and length + max_new_tokens > context:
            read = f"it has {length} tokens and generation.max_new_tokens is {max_new_tokens}"
            raise refused(prompt, read, f"no more than the model's context together, {context} tokens")
        longest = max(longest, length)
    return longest


def _refuse_chat_with_a_bootstrapped_model(prompts: PromptsConfig, asked: PromptSet) -> None:
    conversation = next((prompt for prompt in (*asked.train, *asked.eval) if prompt.messages), None)
    keys = [f"prompts.{key}" for key in ("chat", *_ONLY_CHAT) if getattr(prompts, key)]
    if conversation is not None:
        key, read = f"prompt {conversation.prompt_id}", "a list of messages"
    elif keys:
        key, read = keys[0], "set"
    else:
        return
    raise InputError(
        key=key,
        read=f"{read} and model.path is null",
        expected="a model with a chat template there, because the one that bootstrap makes has none",
    )


def check_answers(scorer: Scorer, asked: PromptSet) -> None:
    """Raises PromptsError, naming the prompt, if no response to some prompt can be scored."""
    if (unusable := scorer.first_unusable((*asked.train, *asked.eval))) is not None:
        prompt, reason = unusable
        raise PromptsError(
            file=f"prompt {prompt.prompt_id} of {prompt.source}", read=f"no response to it can be scored: {reason}"
        )


if __name__ == "__main__":
    serve(longest_prompt)
