"""A turn of the policy as its environment gets it, and the environment's answer as the policy reads it.

of text           turn ─► decoded text ─► Environment.step ─► text ─► tokenised by itself
of conversations  turn ─► renderer.parse ─► ChatEnvironment.step ─► messages ─► renderer.next_turn
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from configs.prompts import PromptsConfig
from configs.schema import ModelConfig
from millrace.chat.base import ChatRenderer
from millrace.chat.encoder import PromptEncoder, is_chat, load_encoder
from millrace.generation.environments.base import ChatEnvironment, Environment
from millrace.prompts.dataset import PromptSet
from millrace.types import Prompt


class Answer(NamedTuple):
    """What an environment answers to a turn."""

    done: bool
    """Whether that turn was the last one."""
    tokens: list[int]
    """Token ids to append after it; empty if it was the last."""
    message_starts: list[tuple[str, int]]
    """(role, index of its first token in `tokens`) of each message, that of the policy's next turn included."""


class Exchange(ABC):
    """Lets environments of one kind play with a policy."""

    @abstractmethod
    def answer(
        self, environment: Environment | ChatEnvironment, prompt: Prompt, before: Sequence[int], turn: Sequence[int]
    ) -> Answer:
        """The environment's answer to the policy's `turn`, which follows the tokens `before`.

        Raises whatever the environment raises, and ChatError if nothing can follow that turn.
        """


class TextExchange(Exchange):
    """For environments of text. A turn's last token is left out of its text if it is one of `stop_token_ids`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] = ()) -> None:
        """Without `stop_token_ids`, the tokenizer's end-of-sequence token is the only one."""
        self._tokenizer = tokenizer
        self._ends = frozenset(stop_token_ids or [tokenizer.eos_token_id])

    def answer(
        self, environment: Environment | ChatEnvironment, prompt: Prompt, before: Sequence[int], turn: Sequence[int]
    ) -> Answer:
        said = turn[:-1] if turn[-1] in self._ends else turn
        text = self._tokenizer.decode(list(said), clean_up_tokenization_spaces=False)
        observation = cast(Environment, environment).step(str(text))
        if observation.done:
            return Answer(True, [], [])
        return Answer(False, self._tokenizer(observation.text, add_special_tokens=False)["input_ids"], [])


class ChatExchange(Exchange):
    """For environments of conversations, in the template of `encoder`, which has a renderer."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._renderer = cast(ChatRenderer, encoder.renderer)

    def answer(
        self, environment: Environment | ChatEnvironment, prompt: Prompt, before: Sequence[int], turn: Sequence[int]
    ) -> Answer:
        tools = self._encoder.tools_of(prompt)
        observation = cast(ChatEnvironment, environment).step(self._renderer.parse(turn, before, tools))
        if observation.done:
            return Answer(True, [], [])
        return Answer(False, *self._renderer.next_turn(before, turn, observation.messages, tools))


def exchange_of(environment: type[Environment] | type[ChatEnvironment], encoder: PromptEncoder) -> Exchange:
    """The exchange between `environment` and the policy whose prompts `encoder` writes."""
    if issubclass(environment, ChatEnvironment):
        return ChatExchange(encoder)
    return TextExchange(encoder.tokenizer, encoder.stop_token_ids)


def prompt_encoder(
    folder: Path,
    model: ModelConfig,
    prompts: PromptsConfig,
    asked: PromptSet,
    environment: type[Environment] | type[ChatEnvironment] | None,
) -> PromptEncoder:
    """The encoder of a run's prompts for the model in `folder`.

    The run is chat if its prompts `asked` are, or if its environment converses. Raises InputError as `is_chat` and
    `load_encoder` do.
    """
    converses = environment is not None and issubclass(environment, ChatEnvironment)
    tools = environment.tools if environment is not None and issubclass(environment, ChatEnvironment) else ()
    chat = converses or is_chat(prompts, (*asked.train, *asked.eval))
    return load_encoder(folder, model, prompts, tools, chat=chat)
