"""Tasks of the package `reasoning_gym`: problems with verifiable answers, generated on demand.

task, seed, size, config ─► data set ─► entry i ─► prompt         the same entry in every process

The package takes seconds to import: only child processes and scorers import this module.
"""

import difflib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.errors import PromptsError
from millrace.prompts.packages import PromptSource
from millrace.types import Prompt

_EXAMPLES = ("chain_sum", "countdown", "gsm_symbolic")


def prompts(task: PromptSource) -> Iterator[Prompt]:
    """The prompts of a task: `size` of them, in the package's order.

    A task without a single right answer gives prompts with an empty one. Raises PromptsError for an unknown task and
    for arguments that the task refuses.
    """
    dataset = open_dataset(task.name, task.arguments)
    for index in range(len(dataset)):
        problem = entry(dataset, index)
        yield task.prompt(index, problem["question"], problem["answer"])


def open_dataset(task: str, arguments: Mapping[str, Any]) -> Any:
    """The task's `ProceduralDataset`. Raises PromptsError for an unknown task and for arguments that it refuses."""
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

    A few tasks also use the process's own random state, which is seeded here, or iterate over sets, so every process
    that calls this must have the same PYTHONHASHSEED.
    """
    random.seed(index)
    problem: dict[str, Any] = dataset[index]
    return problem
