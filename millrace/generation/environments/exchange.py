"""A turn of the policy as its environment gets it, and the environment's answer as the policy reads it.

of text           turn ─► decoded text ─► Environment.step ─► text ─► tokens
of conversations  turn ─► renderer.parse ─► ChatEnvironment.step ─► messages ─► renderer.next_turn
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from configs.prompts import PromptsConfig
from configs.schema import ModelConfig
from millrace.chat.base import ChatRenderer, Rendered
from millrace.chat.encoder import PromptEncoder, is_chat, load_encoder
from millrace.generation.environments.base import AnyEnvironment, ChatEnvironment, Environment
from millrace.prompts.dataset import PromptSet
from millrace.types import Prompt


class TextExchange:
    """Plays environments of text with a policy. A turn's text does not include a last token of `stop_token_ids`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] = ()) -> None:
        """Without `stop_token_ids`, the tokenizer's end-of-sequence token is the only one."""
        self._tokenizer = tokenizer
        self._ends = frozenset(stop_token_ids or [tokenizer.eos_token_id])

    def answer(
        self, environment: AnyEnvironment, prompt: Prompt, before: Sequence[int], turn: Sequence[int]
    ) -> Rendered | None:
        """Returns the tokens after the policy's `turn`; None if it was the last. Raises what the environment raises."""
        said = turn[:-1] if turn[-1] in self._ends else turn
        text = self._tokenizer.decode(list(said), clean_up_tokenization_spaces=False)
        observation = cast(Environment, environment).step(str(text))
        if observation.done:
            return None
        return Rendered(tuple(self._tokenizer(observation.text, add_special_tokens=False)["input_ids"]))


class ChatExchange:
    """Plays environments of conversations with a policy, in the template of `encoder`, which has a renderer."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._renderer = cast(ChatRenderer, encoder.renderer)

    def answer(
        self, environment: AnyEnvironment, prompt: Prompt, before: Sequence[int], turn: Sequence[int]
    ) -> Rendered | None:
        """Returns the tokens after the policy's `turn`, which follows the tokens `before`; None if it was the last.

        Raises what the environment raises, and ChatError if nothing can follow that turn.
        """
        tools = self._encoder.tools_of(prompt)
        observation = cast(ChatEnvironment, environment).step(self._renderer.parse(turn, before, tools))
        return None if observation.done else self._renderer.next_turn(before, turn, observation.messages, tools)


Exchange = TextExchange | ChatExchange


def prompt_encoder(
    folder: Path,
    model: ModelConfig,
    prompts: PromptsConfig,
    asked: PromptSet,
    environment: type[AnyEnvironment] | None,
) -> PromptEncoder:
    """The encoder of a run's prompts for the model in `folder`.

    The run is chat if its prompts `asked` are, or if its environment converses. Raises InputError as `is_chat` and
    `load_encoder` do.
    """
    if environment is not None and issubclass(environment, ChatEnvironment):
        return load_encoder(folder, model, prompts, environment.tools, chat=True)
    return load_encoder(folder, model, prompts, (), chat=is_chat(prompts, (*asked.train, *asked.eval)))
