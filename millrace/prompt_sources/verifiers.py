"""Single-turn environments of the package `verifiers`: their rows as prompts, their rubric as reward.

environment, arguments ─► load_environment ─► data set or evaluation data set ─► row i ─► prompt

Loading an environment runs its author's code, takes seconds, and sets signal handlers of its own: only children do it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.errors import PromptsError
from millrace.prompt_sources.origin import makers
from millrace.types import Prompt

_EVAL = "#eval"


def prompts(source: str, options: Mapping[str, Any]) -> Iterator[Prompt]:
    """The prompts of `source`, `verifiers:ENVIRONMENT`, in its order; with `#eval` after it, of its evaluation set.

    `options` has `arguments`, those of its `load_environment`. A row without an answer, which a rubric may not need,
    gives a prompt with an empty one. Raises PromptsError for an environment that can't be loaded or asks for turns.
    """
    [maker] = makers(source, options)
    environment = open_environment(maker.name, maker.arguments)
    for index, row in enumerate(rows(environment, maker.name)):
        answer = row.get("answer")
        yield Prompt(
            prompt_id=f"{maker.name}:{index}",
            text=prompt_text(row["prompt"]),
            answer="" if answer is None else str(answer),
            source=maker.source(),
        )


def open_environment(name: str, arguments: Mapping[str, Any]) -> Any:
    """The `SingleTurnEnv` that `name` stands for. Raises PromptsError with one sentence for any other."""
    import datasets
    import verifiers

    # A progress bar leaves a thread behind, and processes that judge are forked from the one that loads.
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
    """The rows that `name` stands for: each with `prompt`, and maybe `answer`, `info` and `task`."""
    return list(environment.get_eval_dataset() if name.endswith(_EVAL) else environment.get_dataset())


def prompt_text(messages: str | list[dict[str, Any]]) -> str:
    """A row's prompt as one text: the contents of its messages, with an empty line between two.

    No chat template is applied: `prompts.template` may put a model's own marks around it.
    """
    if isinstance(messages, str):
        return messages
    return "\n\n".join(str(message["content"]) for message in messages)
