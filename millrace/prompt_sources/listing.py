"""Prompts that another package lists: asked for in a child process, whose code and memory end with it.

listed_prompts ──stdin: Request──► python -m millrace.prompt_sources.listing ─► the package
      ▲                                                │
      └───── stdout: prompts, or one sentence ─────────┘

The packages take seconds to import, bring hundreds of megabytes, and run code of many authors: none of that is for the
controller or a stage.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from millrace.errors import PromptsError
from millrace.packages import EXTRAS, check_installed
from millrace.prompt_sources.checked_text import checked_text
from millrace.types import Prompt


def listed_prompts(source: str, options: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of `source`, "package:name", with a package's `options` (plain JSON).

    A first call takes some seconds; a second one for the same costs nothing. Raises InputError for a package that
    is not installed, PromptsError for whatever it refuses: one sentence each.
    """
    return list(_listed(source, json.dumps(options, sort_keys=True)))


@functools.lru_cache(maxsize=4)
def _listed(source: str, options: str) -> tuple[Prompt, ...]:
    package = source.partition(":")[0]
    check_installed(package, EXTRAS[package], f"prompts are from {source}")
    done = subprocess.run(
        [sys.executable, "-m", "millrace.prompt_sources.listing"],
        input=json.dumps({"source": source, "options": json.loads(options)}),
        # Some tasks iterate over sets of strings: with another hash seed they would make other problems.
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
    return tuple(Prompt(**record) for record in answer["prompts"])


def main() -> None:
    """The child: a request on stdin, the answer on stdout."""
    # The packages print as they like: to stderr with all of it.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    package = importlib.import_module(f"millrace.prompt_sources.{request['source'].partition(':')[0]}")
    found: dict[str, Any]
    try:
        found = {"prompts": [asdict(prompt) for prompt in package.prompts(request["source"], request["options"])]}
    except PromptsError as error:
        found = {"refused": str(error)}
    json.dump(found, answer)
    answer.close()


if __name__ == "__main__":
    main()
