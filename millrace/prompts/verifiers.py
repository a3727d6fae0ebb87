"""Single-turn environments of the package `verifiers`: their rows become prompts.

environment, arguments ─► load_environment ─► data set or evaluation data set ─► row i ─► prompt

Loading an environment runs its author's code, takes seconds, and sets signal handlers: only child processes do it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.errors import PromptsError
from millrace.prompts.messages import checked_messages
from millrace.prompts.packages import PromptSource
from millrace.types import Prompt

_EVAL = "#eval"


def prompts(source: PromptSource) -> Iterator[Prompt]:
    """The prompts of an environment, in its order; if its name ends with `#eval`, those of its evaluation set.

    The arguments of `source` are those of its `load_environment`. A row without an answer, which a rubric may not need,
    gives a prompt with an empty one. Raises PromptsError for an environment that can't be loaded or has several turns.
    """
    environment = open_environment(source.name, source.arguments)
    for index, row in enumerate(rows(environment, source.name)):
        asked = row["prompt"]
        place = f"verifiers:{source.name} row {index + 1}"
        messages = () if isinstance(asked, str) else checked_messages(_plain(asked), place)
        yield source.prompt(index, prompt_text(asked), row.get("answer"), messages)


def open_environment(name: str, arguments: Mapping[str, Any]) -> Any:
    """The `SingleTurnEnv` called `name`. Raises PromptsError with one sentence for any other kind."""
    import datasets
    import verifiers

    # A progress bar leaves a thread behind, and reward workers are forked from the process that loads.
    datasets.disable_progress_bars()
    source = f"verifiers:{name}"
    try:
        environment = verifiers.load_environment(name.removesuffix(_EVAL), **arguments)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PromptsError(f'prompts source "{source}": {reason}') from error
    if not isinstance(environment, verifiers.SingleTurnEnv):
        kind = type(environment).__name__
        raise PromptsError(f'prompts source "{source}" is a {kind}; expected a SingleTurnEnv')
    return environment


def rows(environment: Any, name: str) -> list[dict[str, Any]]:
    """The rows of its training or evaluation set: each with `prompt`, and maybe `answer`, `info` and `task`."""
    return list(environment.get_eval_dataset() if name.endswith(_EVAL) else environment.get_dataset())


def prompt_text(messages: str | list[dict[str, Any]]) -> str:
    """A row's prompt as one text: the contents of its messages, separated by empty lines.

    The policy reads it where `prompts.chat` is false; rewards always do.
    """
    if isinstance(messages, str):
        return messages
    return "\n\n".join(str(message["content"]) for message in messages)


def _plain(messages: Any) -> list[dict[str, Any]]:
    """Messages as plain JSON; some environments give objects."""
    return [message if isinstance(message, dict) else message.model_dump() for message in messages]
