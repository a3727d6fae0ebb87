"""Reward of a single-turn `verifiers` environment, by its own rubric and parser.

row's source and prompt_id ─► environment, index ─► its row ─► state ─┐
response ─► the assistant's one message ──────────────────────────────┴─► rubric ─► reward, and a component a function
"""

import asyncio
import functools
import logging
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from millrace.prompts.packages import EXTRAS, PromptSource, check_installed, index_of
from millrace.rewards.base import Reward, Score
from millrace.rewards.import_path import source_hash
from millrace.types import Prompt


class Verifiers(Reward):
    """Scores responses to prompts of `verifiers:ENVIRONMENT`.

    Components: each of the rubric's functions by its name. A function that fails is an error, though `verifiers` itself
    would count it as 0. So is a prompt that the environment no longer has.
    """

    name = "verifiers"
    isolated = True

    def __init__(self, *, sources: Sequence[str] = ()) -> None:
        """`sources` are those of the prompts to come. Their environments are loaded before the first response's time
        begins, in a process that may still write files.

        Raises InputError if the package is not installed.
        """
        check_installed("verifiers", EXTRAS["verifiers"], "scoring.reward verifiers")
        self._sources = [source for source in sources if PromptSource.parse(source).package == "verifiers"]
        # The modules from which `verifiers.load_environment` loads the environments.
        names = [PromptSource.parse(source).name.partition("#")[0] for source in self._sources]
        modules = sorted({name.rpartition("/")[2].replace("-", "_") for name in names})
        hashes = [f"{module} {source_hash(module)}" for module in modules]
        self.version = " ".join([f"1 verifiers {version('verifiers')}", *hashes])

    def load(self) -> None:
        for source in self._sources:
            _environment(source)

    def score(self, prompt: Prompt, response: str) -> Score:
        """Raises ValueError for a prompt that is not the environment's, RuntimeError if a rubric function failed."""
        # Imported late: reading the reward's version must not wait for the package.
        from millrace.prompts.packages import prompt_text

        environment, rows = _environment(prompt.source)
        row = rows[index_of(prompt)]
        if prompt_text(row["prompt"]) not in prompt.text:
            raise ValueError(f"the environment's row {prompt.prompt_id} is another one than the prompt's")
        warnings = _Warnings()
        logging.getLogger("verifiers").addHandler(warnings)
        try:
            state = asyncio.run(_final_state(environment, row, response))
        finally:
            logging.getLogger("verifiers").removeHandler(warnings)
        if warnings.lines:
            raise RuntimeError(warnings.lines[0])
        return Score(
            reward=float(state["reward"]),
            components={name: float(value) for name, value in state["metrics"].items()},
        )


async def _final_state(environment: Any, row: Any, response: str) -> Any:
    """Return the state of a rollout that consists of `response`, with `reward` and `metrics`."""
    # No client: the response is there already.
    state = await environment.init_state(row, None, "")
    state = await environment.setup_state(state) or state
    chat = environment.message_type == "chat"
    state["completion"] = [{"role": "assistant", "content": response}] if chat else response
    state["is_completed"] = True
    await environment.rubric.score_rollout(state)
    return state


class _Warnings(logging.Handler):
    """Collects the log lines of `verifiers` at WARNING or above, the only trace of a rubric function that failed.

    Its rubrics catch the exceptions of their functions, log them, and count 0.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@functools.cache
def _environment(source: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return the environment and its rows."""
    from millrace.prompts.packages import open_environment, rows

    parsed = PromptSource.parse(source)
    if parsed.package != "verifiers":
        raise ValueError(f'the prompt is from "{source}"; expected a source verifiers:ENVIRONMENT')
    environment = open_environment(parsed.name, parsed.arguments)
    return environment, rows(environment, parsed.name)
