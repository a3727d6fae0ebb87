"""The origin of a package's prompt, as short text that every row of a stored run holds.

package, name, arguments ─► Prompt.source     reasoning_gym:chain_sum {"max_digits": 1, "seed": 0, "size": 500}
             name, index ─► Prompt.prompt_id  chain_sum:17

From both together a reward finds the package's entry again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.types import Message, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSource:
    """One task or environment of a package, with its arguments."""

    package: str
    """`reasoning_gym` or `verifiers`."""
    name: str
    """The package's name of the task or environment."""
    arguments: Mapping[str, Any]
    """What it is created with: plain JSON."""

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


def prompt_sources(source: str, options: Mapping[str, Any]) -> list[PromptSource]:
    """The sources that a config's `source` names, with the package's section of the config as `options`.

    `reasoning_gym` has `size` and `seed` for every task, and `config` with more arguments by task. `verifiers` has
    `arguments`.
    """
    package, _, name = source.partition(":")
    if package == "verifiers":
        return [PromptSource(package=package, name=name, arguments=options["arguments"])]
    shared = {"size": options["size"], "seed": options["seed"]}
    return [
        PromptSource(package=package, name=task, arguments={**options["config"].get(task, {}), **shared})
        for task in name.split(",")
    ]


def index_of(prompt: Prompt) -> int:
    """The prompt's index in its source, from 0. Raises ValueError where its id does not end in a number."""
    return int(prompt.prompt_id.rpartition(":")[2])
