"""Prompts of other packages, listed by a child process. Each package is installed by an extra of Millrace.

listed_prompts ──stdin: sources──► python -m millrace.prompts.packages ─► the package
      ▲                                                │
      └───── stdout: prompts, or one sentence ─────────┘

package, name, arguments ─► Prompt.source     reasoning_gym:chain_sum {"max_digits": 1, "seed": 0, "size": 500}
             name, index ─► Prompt.prompt_id  chain_sum:17

From source and id together a reward finds the package's entry again. The packages take seconds to import, bring
hundreds of megabytes, set signal handlers, and run code of many authors. Only the child and scorers import them.
"""

import difflib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from configs.task import PromptsConfig
from millrace.errors import MissingExtra, PromptsError, from_json, one_line, to_json
from millrace.prompts.messages import checked_messages, checked_text
from millrace.types import Message, Prompt

_GYM_SEED = 0
"""Generated problems don't depend on the run's seed."""
_GYM_EXAMPLES = ("chain_sum", "countdown", "gsm_symbolic")
_EVAL = "#eval"
"""Ends the name of an environment of `verifiers` whose evaluation set is meant."""
EXTRAS = {"reasoning_gym": "reasoning-gym", "verifiers": "verifiers"}
"""Packages that bring prompts and rewards for them, each with the extra that installs it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSource:
    """One task or environment of a package, with its arguments."""

    package: str
    """`reasoning_gym` or `verifiers`."""
    name: str
    """The package's name of the task or environment."""
    arguments: Mapping[str, Any]
    """Plain JSON."""

    @property
    def text(self) -> str:
        """`Prompt.source` of its prompts."""
        return f"{self.package}:{self.name} {json.dumps(self.arguments, sort_keys=True)}"

    @classmethod
    def parse(cls, text: str) -> "PromptSource":
        """The inverse of `text`. Raises ValueError for the source of a prompt that no package made."""
        package, _, rest = text.partition(":")
        name, _, arguments = rest.partition(" ")
        if not arguments:
            raise ValueError(f'the prompt is from "{text}"; expected one from a package')
        return cls(package=package, name=name, arguments=json.loads(arguments))


def prompt_sources(source: str, prompts: PromptsConfig) -> list[PromptSource]:
    """Parses `source`, "package:name": an environment, or tasks. Empty if it names no package.

    Raises PromptsError for a task that is named twice.
    """
    package, colon, name = source.partition(":")
    if not colon or package not in EXTRAS:
        return []
    if package == "verifiers":
        return [PromptSource(package=package, name=name, arguments=prompts.verifiers.arguments)]
    gym, tasks = prompts.reasoning_gym, name.split(",")
    if len(set(tasks)) < len(tasks):
        raise PromptsError(f'"{source}"', key="prompts.source", expected="each task once")
    shared = {"size": gym.size, "seed": _GYM_SEED}
    return [
        PromptSource(package=package, name=task, arguments={**gym.config.get(task, {}), **shared}) for task in tasks
    ]


def index_of(prompt: Prompt) -> int:
    """The prompt's index in its source, from 0. Raises ValueError where its id does not end in a number."""
    return int(prompt.prompt_id.rpartition(":")[2])


def check_installed(package: str, extra: str, what: str) -> None:
    """Raises MissingExtra if `package` is not installed. `what` is the setting that needs it."""
    if find_spec(package) is None:
        raise MissingExtra(what, package, extra)


def listed_prompts(sources: Sequence[PromptSource]) -> list[Prompt]:
    """The prompts of `sources`, at least one, all of one package; takes seconds.

    Raises InputError for a package that is not installed, and PromptsError with one sentence for anything that the
    package refuses.
    """
    package = sources[0].package
    source = f"{package}:{','.join(task.name for task in sources)}"
    check_installed(package, EXTRAS[package], f"prompts.source {source}")
    done = subprocess.run(
        [sys.executable, "-m", "millrace.prompts.packages"],
        input=json.dumps([asdict(task) for task in sources]),
        # Some tasks iterate over sets of strings, so their problems depend on the hash seed.
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "nothing was written")
        read = f'"{source}", and listing them ended with code {done.returncode}: {last.strip()}'
        raise PromptsError(read, key="prompts.source")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise from_json(answer["error"])
    for record in answer["prompts"]:
        checked_text(record, "text", f"{source} entry {record['prompt_id']}")
    if not answer["prompts"]:
        raise PromptsError("no prompts", file=source, expected="at least one")
    return [Prompt.from_json(record) for record in answer["prompts"]]


def open_dataset(task: str, arguments: Mapping[str, Any]) -> Any:
    """The task's `ProceduralDataset`. Raises PromptsError for an unknown task and for arguments that it refuses."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS)
        hint = " or ".join(near) or f"one such as {', '.join(_GYM_EXAMPLES)}"
        raise PromptsError(f'"reasoning_gym:{task}", and there is no such task', key="prompts.source", expected=hint)
    try:
        return reasoning_gym.create_dataset(task, **arguments)
    except Exception as error:
        raise PromptsError(
            f"refused by the task: {one_line(error)}", key=f"prompts.reasoning_gym.config.{task}"
        ) from error


def entry(dataset: Any, index: int) -> dict[str, Any]:
    """Entry `index` (≥ 0) of a data set: `question`, `answer` and `metadata`, the same in every process.

    A few tasks also use the process's own random state, which is seeded here, or iterate over sets, so every process
    that calls this must have the same PYTHONHASHSEED.
    """
    random.seed(index)
    problem: dict[str, Any] = dataset[index]
    return problem


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
        raise PromptsError(f'"{source}": {one_line(error)}', key="prompts.source") from error
    if not isinstance(environment, verifiers.SingleTurnEnv):
        read = f'"{source}", a {type(environment).__name__}'
        raise PromptsError(read, key="prompts.source", expected="a SingleTurnEnv")
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


def _prompts(source: PromptSource) -> Iterator[Prompt]:
    """The prompts of a source, which the package lists. The answer is empty where the package has none."""
    listed: Iterator[dict[str, Any]]
    if source.package == "reasoning_gym":
        dataset = open_dataset(source.name, source.arguments)
        problems = (entry(dataset, index) for index in range(len(dataset)))
        listed = ({"prompt": problem["question"], "answer": problem["answer"]} for problem in problems)
    else:
        listed = iter(rows(open_environment(source.name, source.arguments), source.name))
    for index, row in enumerate(listed):
        prompt, answer = row["prompt"], row.get("answer")
        messages: tuple[Message, ...] = ()
        if not isinstance(prompt, str):
            # Some environments give objects.
            plain = [message if isinstance(message, dict) else message.model_dump() for message in prompt]
            messages = checked_messages(plain, f"{source.package}:{source.name} row {index + 1}")
        yield Prompt(
            prompt_id=f"{source.name}:{index}",
            text=prompt_text(prompt),
            answer="" if answer is None else str(answer),
            source=source.text,
            messages=messages,
        )


def main() -> None:
    """The child process."""
    # The packages print to stdout: all of that goes to stderr.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sources = [PromptSource(**values) for values in json.load(sys.stdin)]
    answer: dict[str, Any]
    try:
        answer = {"prompts": [asdict(prompt) for source in sources for prompt in _prompts(source)]}
    except PromptsError as error:
        answer = {"error": to_json(error)}
    json.dump(answer, output)
    output.close()


if __name__ == "__main__":
    main()
