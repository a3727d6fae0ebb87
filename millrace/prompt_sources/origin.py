"""Where a package's prompt is from, in so few words that every row of a stored run can hold them.

package, name, arguments ─► Prompt.source     reasoning_gym:chain_sum {"max_digits": 1, "seed": 0, "size": 500}
             name, index ─► Prompt.prompt_id  chain_sum:17
                                              both together: the entry again, for a reward that needs all of it
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Maker:
    """What makes the prompts of one source."""

    package: str
    """`reasoning_gym` or `verifiers`."""
    name: str
    """Of the task or environment, in the package's own words."""
    arguments: Mapping[str, Any]
    """What it is made with: plain JSON."""

    def source(self) -> str:
        """`Prompt.source` of all it makes."""
        return f"{self.package}:{self.name} {json.dumps(self.arguments, sort_keys=True)}"


def makers(source: str, options: Mapping[str, Any]) -> list[Maker]:
    """What makes the prompts that a config calls `source`, with the package's `options` there.

    Those of `reasoning_gym` are `size` and `seed` of every task, and `config`: more arguments by the task's name. That
    of `verifiers` is `arguments`.
    """
    package, _, name = source.partition(":")
    if package == "verifiers":
        return [Maker(package=package, name=name, arguments=options["arguments"])]
    shared = {"size": options["size"], "seed": options["seed"]}
    return [
        Maker(package=package, name=task, arguments={**options["config"].get(task, {}), **shared})
        for task in name.split(",")
    ]


def maker_of(source: str) -> Maker:
    """What made the prompts whose `source` this is. Raises ValueError where no package did."""
    package, _, rest = source.partition(":")
    name, _, arguments = rest.partition(" ")
    if not arguments:
        raise ValueError(f'the prompt is from "{source}"; expected one that a package made')
    return Maker(package=package, name=name, arguments=json.loads(arguments))


def index_of(prompt: Prompt) -> int:
    """The prompt's place in what its maker makes, from 0. Raises ValueError where its id ends in no number."""
    return int(prompt.prompt_id.rpartition(":")[2])
