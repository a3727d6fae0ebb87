"""Checks whether every prompt can be put to the model, and its answer scored, before anything of a run exists.

    stdin: model, prompts ─► python -m millrace.preflight.prompts ─► transformers ─► longest, or one sentence

The child process keeps transformers out of the parent, which does not need it otherwise.
"""

import hashlib
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from tokenizers import Tokenizer

from configs.schema import ModelConfig, RunConfig
from configs.task import EnvironmentConfig, PromptsConfig
from millrace.errors import ChatError, InputError, PromptsError
from millrace.preflight.child import serve
from millrace.prompts.dataset import PromptSet
from millrace.prompts.stored import is_stored_run
from millrace.runs.provenance import read_start_hashes
from millrace.types import Prompt
from storage.stores.factory import open_store

if TYPE_CHECKING:
    from millrace.chat.completeness import CompletenessCheck
    from millrace.rewards.scorer import Scorer

_LONGEST_SECONDS = 10
"""For one prompt: writing it takes milliseconds."""
_TOKENIZER = "tokenizer.json"
_LOOKED_AT = 64
"""Longest prompts of a source whose tokens are counted without transformers."""
_ONLY_CHAT = ("system_prompt", "response_prefix", "tools")


def check_prompts(
    model: ModelConfig,
    prompts: PromptsConfig,
    environment: EnvironmentConfig,
    prompt_set: PromptSet,
    *,
    context: int | None,
    max_new_tokens: int,
    vocab_size: int | None = None,
    ask: Callable[[str, Any, str], Any],
) -> int | None:
    """Return the length of the longest prompt, tokens; None if bootstrap has still to make the tokenizer.

    `context` and `vocab_size` are the model's, tokens; None if its config does not say. `ask` starts the child process.
    Raises InputError about the first prompt that can't be put to the model.
    """
    keys = [f"prompts.{key}" for key in ("chat", *_ONLY_CHAT) if getattr(prompts, key)]
    if model.path is None:
        conversation = next((prompt for prompt in (*prompt_set.train, *prompt_set.eval) if prompt.messages), None)
        if conversation is not None or keys:
            key, read = (keys[0], "set") if conversation is None else (_name(conversation), "a list of messages")
            expected = "a model with a chat template there, because the one that bootstrap makes has none"
            raise InputError(f"{read} and model.path is null", key=key, expected=expected)
        return None
    folder = Path(model.path).expanduser()
    if prompts.demonstrations and is_stored_run(prompts.source):
        _check_tokenizer(prompts.source, folder)
    question = {
        "model": model.model_dump(),
        "prompts": prompts.model_dump(),
        "environment": environment.model_dump(),
        "train": [asdict(prompt) for prompt in prompt_set.train],
        "eval": [asdict(prompt) for prompt in prompt_set.eval],
        "limits": {"context": context, "vocab_size": vocab_size, "max_new_tokens": max_new_tokens},
    }
    longest: int = ask("millrace.preflight.prompts", question, "the prompts")
    return longest


def _check_tokenizer(run_url: str, folder: Path) -> None:
    """Raises InputError if the run's rollouts are the tokens of another tokenizer than that in the model's folder."""
    expected = (read_start_hashes(open_store(run_url)) or {}).get(_TOKENIZER)
    file = folder / _TOKENIZER
    if expected is not None and (not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != expected):
        read = f"another one than the {_TOKENIZER} of {run_url}"
        raise InputError(read, key=str(file), expected="the same, because its tokens are learned as they are stored")


def longest_prompt(question: Mapping[str, Any]) -> int:
    """The child process: return and raise what `check_prompts` does. Imports transformers."""
    from millrace.chat.completeness import CompletenessCheck
    from millrace.generation.environments.base import environment_class
    from millrace.generation.environments.episodes import check_demonstration, prompt_encoder

    model, prompts = ModelConfig(**question["model"]), PromptsConfig(**question["prompts"])
    train, held_out = (tuple(Prompt.from_json(prompt) for prompt in question[half]) for half in ("train", "eval"))
    name = question["environment"]["name"]
    environment = environment_class(name)
    assert model.path is not None
    prompt_set = PromptSet(train=train, eval=held_out)
    encoder = prompt_encoder(Path(model.path).expanduser(), model, prompts, prompt_set, environment)
    if encoder.renderer is None:
        if unused := [f"prompts.{key}" for key in _ONLY_CHAT if getattr(prompts, key) is not None]:
            read = "set and the prompts are plain text"
            raise InputError(read, key=unused[0], expected="prompts.chat: true with it")
    elif prompts.template is not None:
        read = f"set and the prompts are conversations, which {encoder.renderer.name} writes"
        raise InputError(read, key="prompts.template", expected="null")
    elif environment is not None:
        try:
            encoder.renderer.check_several_turns(encoder.tools)
        except ChatError as error:
            raise ChatError(f"{name}, and {error}", key="environment.name") from error
    context, vocab_size, max_new_tokens = (
        question["limits"][name] for name in ("context", "vocab_size", "max_new_tokens")
    )
    longest, completeness = 0, CompletenessCheck(encoder)
    learned = train if prompts.demonstrations else ()
    for number, prompt in enumerate((*train, *held_out)):
        tokens, response = _encode(completeness, prompt, demonstrates=number < len(learned))
        length, place = len(tokens), _name(prompt)
        check_demonstration(prompt.prompt_id, len(response), max_new_tokens)
        if not tokens:
            raise InputError("it has no tokens", file=place, expected="text that the tokenizer knows")
        highest = max(*tokens, *response)
        if vocab_size is not None and highest >= vocab_size:
            read = f"it holds token {highest} of the tokenizer, and the model knows {vocab_size} tokens"
            raise InputError(read, file=place, expected="a tokenizer of the model's own")
        _check_length(prompt, length, max_new_tokens, context)
        longest = max(longest, length)
    return longest


def _encode(check: "CompletenessCheck", prompt: Prompt, *, demonstrates: bool) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the prompt and of its demonstration, () unless `demonstrates`.

    Raises ChatError for a chat template that leaves a part out, or does not come to an end.
    """

    def give_up(signal_number: int, frame: FrameType | None) -> NoReturn:
        read = f"the chat template has not written it within {_LONGEST_SECONDS} s"
        raise ChatError(read, file=_name(prompt), expected="one that ends")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_LONGEST_SECONDS)
    try:
        check.check(prompt, demonstrates=demonstrates)
        return check.encoder.encode(prompt).tokens, check.encoder.demonstrate(prompt).tokens if demonstrates else ()
    finally:
        signal.alarm(0)


def check_texts(config: RunConfig, context: int | None, prompt_set: PromptSet) -> None:
    """Raises InputError about a long prompt whose text alone exceeds the model's context, tokens.

    Takes milliseconds, because it needs no transformers; `check_prompts` counts exactly.
    """
    limit, max_new_tokens = config.generation.engine_args.get("max_model_len"), config.generation.max_new_tokens
    room = min((size for size in (context, limit) if isinstance(size, int)), default=None)
    file = None if config.model.path is None else Path(config.model.path).expanduser() / _TOKENIZER
    if file is None or room is None or not file.is_file():
        return
    # A token has a byte at least.
    texts = [each for each in (*prompt_set.train, *prompt_set.eval) if len(each.text.encode()) > room - max_new_tokens]
    longest = sorted(texts, key=lambda prompt: len(prompt.text), reverse=True)[:_LOOKED_AT]
    lengths: list[int] = []
    # A damaged file is reported by the check of the folder; its errors are bare exceptions.
    with suppress(Exception):
        tokenizer = Tokenizer.from_file(str(file))
        lengths = [len(tokenizer.encode(each.text.strip(), add_special_tokens=False).ids) for each in longest]
    for prompt, length in zip(longest, lengths, strict=False):
        _check_length(prompt, length, max_new_tokens, room)


def _check_length(prompt: Prompt, length: int, max_new_tokens: int, context: int | None) -> None:
    if context is not None and length + max_new_tokens > context:
        read = f"it has {length} tokens and generation.max_new_tokens is {max_new_tokens}"
        raise InputError(read, file=_name(prompt), expected=f"no more than the context together, {context} tokens")


def _name(prompt: Prompt) -> str:
    """The prompt with its file: its own id does not name that."""
    is_row = prompt.prompt_id.startswith(f"{prompt.source}:")
    return f"prompt {prompt.prompt_id}" if is_row else f"prompt {prompt.prompt_id} of {prompt.source}"


def check_answers(scorer: "Scorer", source: str, prompt_set: PromptSet) -> None:
    """Raises PromptsError, naming the prompt, if no response to some prompt of this source can be scored."""
    if (unusable := scorer.first_unusable(source, (*prompt_set.train, *prompt_set.eval))) is not None:
        prompt, reason = unusable
        read = f"no response to it can be scored: {reason}"
        raise PromptsError(read, file=f"prompt {prompt.prompt_id} of {prompt.source}")


if __name__ == "__main__":
    serve(longest_prompt)
