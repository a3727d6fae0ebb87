"""Prompts of other packages, listed by a child process. Each package is installed by an extra of Millrace.

listed_prompts ──stdin: sources──► python -m millrace.prompts.packages ─► the package
      ▲                                                │
      └───── stdout: prompts, or one sentence ─────────┘

package, name, arguments ─► Prompt.source     reasoning_gym:chain_sum {"max_digits": 1, "seed": 0, "size": 500}
             name, index ─► Prompt.prompt_id  chain_sum:17

From source and id together a reward finds the package's entry again. The packages take seconds to import, bring
hundreds of megabytes, and run code of many authors. The child keeps all of that out of the controller and the stages,
and frees it when it ends.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from configs.prompts import PromptsConfig
from millrace.errors import MissingExtra, PromptsError
from millrace.prompts.messages import checked_text
from millrace.types import Message, Prompt

_SEED = 0
"""Of generated problems, which don't depend on the run's seed."""
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

    def prompt(self, index: int, text: str, answer: object, messages: tuple[Message, ...] = ()) -> Prompt:
        """Its prompt number `index`; the answer is empty where the package has none."""
        return Prompt(
            prompt_id=f"{self.name}:{index}",
            text=text,
            answer="" if answer is None else str(answer),
            source=self.text,
            messages=messages,
        )


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
        raise PromptsError(f'prompts source "{source}" names a task twice; expected each once')
    shared = {"size": gym.size, "seed": _SEED}
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
    """The prompts of `sources`, at least one, all of one package.

    The first call takes seconds; its result is cached. Raises InputError for a package that is not installed, and
    PromptsError with one sentence for anything that the package refuses.
    """
    return list(_listed(json.dumps([asdict(source) for source in sources], sort_keys=True)))


@functools.lru_cache(maxsize=4)
def _listed(sources: str) -> tuple[Prompt, ...]:
    tasks = json.loads(sources)
    package = tasks[0]["package"]
    source = f"{package}:{','.join(task['name'] for task in tasks)}"
    check_installed(package, EXTRAS[package], f"prompts.source {source}")
    done = subprocess.run(
        [sys.executable, "-m", "millrace.prompts.packages"],
        input=sources,
        # Some tasks iterate over sets of strings, so their problems depend on the hash seed.
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "nothing was written")
        raise PromptsError(f'prompts source "{source}": listing them ended with code {done.returncode}: {last.strip()}')
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise PromptsError(answer["refused"])
    for record in answer["prompts"]:
        checked_text(record, "text", f"{source} entry {record['prompt_id']}")
    if not answer["prompts"]:
        raise PromptsError(f"{source}: no prompts; expected at least one")
    return tuple(Prompt.from_json(record) for record in answer["prompts"])


def main() -> None:
    """The child process."""
    # The packages print to stdout: all of that goes to stderr.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sources = [PromptSource(**values) for values in json.load(sys.stdin)]
    package = importlib.import_module(f"millrace.prompts.{sources[0].package}")
    answer: dict[str, Any]
    try:
        answer = {"prompts": [asdict(prompt) for source in sources for prompt in package.prompts(source)]}
    except PromptsError as error:
        answer = {"refused": str(error)}
    json.dump(answer, output)
    output.close()


if __name__ == "__main__":
    main()
