"""Tasks of the package `reasoning_gym`: procedural problems with verifiable answers, made as they are asked for.

task, seed, size, config ─► data set ─► entry i ─► prompt         an entry follows from these alone, in any process

The package takes seconds to import: only children and scorers import this module.
"""

import difflib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.errors import PromptsError
from millrace.prompt_sources.origin import makers
from millrace.types import Prompt

_EXAMPLES = ("chain_sum", "countdown", "gsm_symbolic")


def prompts(source: str, options: Mapping[str, Any]) -> Iterator[Prompt]:
    """The prompts of each task that `source` names, `reasoning_gym:TASK,…`: `size` of each, in the package's order.

    `options` are those of `makers`. A task that has no single right answer gives prompts with an empty one. Raises
    PromptsError for an unknown task and for arguments it refuses.
    """
    tasks = makers(source, options)
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise PromptsError(f'prompts source "{source}" names a task twice; expected each once')
    for task in tasks:
        dataset = open_dataset(task.name, task.arguments)
        for index in range(len(dataset)):
            found = entry(dataset, index)
            answer = found["answer"]
            yield Prompt(
                prompt_id=f"{task.name}:{index}",
                text=found["question"],
                answer="" if answer is None else str(answer),
                source=task.source(),
            )


def open_dataset(task: str, arguments: Mapping[str, Any]) -> Any:
    """The task's `ProceduralDataset`. Raises PromptsError for an unknown task and for arguments it refuses."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS)
        hint = f"did you mean {' or '.join(near)}?" if near else f"expected one such as {', '.join(_EXAMPLES)}"
        raise PromptsError(f'prompts source "reasoning_gym:{task}": there is no such task; {hint}')
    try:
        return reasoning_gym.create_dataset(task, **arguments)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PromptsError(f'prompts.reasoning_gym.config of "{task}" is refused by the task: {reason}') from error


def entry(dataset: Any, index: int) -> dict[str, Any]:
    """Entry `index` (≥ 0) of a data set: `question`, `answer` and `metadata`, the same in every process.

    A few tasks also draw from the process's own random numbers, or iterate over sets: so those are seeded here, and
    every process that calls this is started with a fixed PYTHONHASHSEED.
    """
    random.seed(index)
    found: dict[str, Any] = dataset[index]
    return found
