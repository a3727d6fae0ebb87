"""Prompts of other packages, listed by a child process.

listed_prompts ──stdin: source, options──► python -m millrace.prompts.listing ─► the package
      ▲                                                │
      └───── stdout: prompts, or one sentence ─────────┘

The packages take seconds to import, bring hundreds of megabytes, and run code of many authors. The child keeps all of
that out of the controller and the stages, and frees it when it ends.
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
from millrace.prompts.extras import EXTRAS, check_installed
from millrace.prompts.text_checks import checked_text
from millrace.types import Prompt


def listed_prompts(source: str, options: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of `source`, "package:name", with the package's `options` (plain JSON).

    The first call takes seconds; its result is cached. Raises InputError for a package that is not installed, and
    PromptsError with one sentence for anything that the package refuses.
    """
    return list(_listed(source, json.dumps(options, sort_keys=True)))


@functools.lru_cache(maxsize=4)
def _listed(source: str, options: str) -> tuple[Prompt, ...]:
    package = source.partition(":")[0]
    check_installed(package, EXTRAS[package], f"prompts.source {source}")
    done = subprocess.run(
        [sys.executable, "-m", "millrace.prompts.listing"],
        input=json.dumps({"source": source, "options": json.loads(options)}),
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
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    package = importlib.import_module(f"millrace.prompts.{request['source'].partition(':')[0]}")
    found: dict[str, Any]
    try:
        found = {"prompts": [asdict(prompt) for prompt in package.prompts(request["source"], request["options"])]}
    except PromptsError as error:
        found = {"refused": str(error)}
    json.dump(found, answer)
    answer.close()


if __name__ == "__main__":
    main()
