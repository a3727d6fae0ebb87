"""Rewards of packages that bring prompts with their own scoring: tasks of `reasoning_gym`, environments of `verifiers`.

source, prompt_id ─► task, seed, index  ─► the entry, made again ─┐
response          ─► answer             ──────────────────────────┴─► score_answer ─► reward, in [0, 1]

source, prompt_id ─► environment, index ─► its row ─► state ─┐
response          ─► the assistant's one message ────────────┴─► rubric ─► reward, and a component per function
"""

import asyncio
import functools
import logging
import re
from collections.abc import Sequence
from importlib.metadata import version
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any

from millrace.prompts.packages import (
    EXTRAS,
    PromptSource,
    check_installed,
    entry,
    index_of,
    open_dataset,
    open_environment,
    prompt_text,
    rows,
)
from millrace.rewards.base import Reward, Score
from millrace.rewards.exact_match import extracted_answer
from millrace.rewards.function import source_hash
from millrace.types import Prompt

_CACHED_ENTRIES = 1024


class ReasoningGym(Reward):
    """Scores responses to prompts of `reasoning_gym:TASK` by the task's own `score_answer`.

    Components: `extracted` (1.0 if the response held an answer at all; else the reward is 0.0). Tasks may give partial
    rewards, some even for a wrong answer. If the installed version makes another problem of the prompt, the score is an
    error.
    """

    name = "reasoning_gym"
    isolated = True

    def __init__(self, *, answer_pattern: str | None = None, sources: Sequence[str] = ()) -> None:
        """`answer_pattern`: see `extracted_answer`. `sources` are those of the prompts to come.

        Raises InputError if the package is not installed.
        """
        self._sources = _installed_sources(self.name, sources)
        self.version = f"2 reasoning_gym {version('reasoning_gym')}"
        self._pattern = None if answer_pattern is None else re.compile(answer_pattern)

    def load(self) -> None:
        """Load the tasks before the first response's time begins."""
        import reasoning_gym  # noqa: F401 — takes seconds

        for source in self._sources:
            _dataset(source)

    def score(self, prompt: Prompt, response: str) -> Score:
        """Raises ValueError for a prompt that the task does not make, or no longer makes."""
        dataset, problem = _entry(prompt.source, index_of(prompt))
        if problem["question"] not in prompt.text:
            raise ValueError(f"{self.version} makes another problem of {prompt.prompt_id} than the prompt's")
        answer = extracted_answer(response, self._pattern)
        reward = 0.0 if answer is None else float(dataset.score_answer(answer.strip(), problem))
        return Score(reward=reward, components={"extracted": float(answer is not None)})


class Verifiers(Reward):
    """Scores responses to prompts of `verifiers:ENVIRONMENT`, a single-turn one, by its own rubric and parser.

    Components: each of the rubric's functions by its name. A function that fails is an error, though `verifiers` itself
    would count it as 0. So is a prompt that the environment no longer has.
    """

    name = "verifiers"
    isolated = True

    def __init__(self, *, sources: Sequence[str] = ()) -> None:
        """`sources` are those of the prompts to come. Raises InputError if the package is not installed."""
        self._sources = _installed_sources(self.name, sources)
        # The modules from which `verifiers.load_environment` loads the environments.
        names = [PromptSource.parse(source).name.partition("#")[0] for source in self._sources]
        modules = sorted({name.rpartition("/")[2].replace("-", "_") for name in names})
        hashes = [f"{module} {source_hash(module)}" for module in modules]
        self.version = " ".join([f"1 verifiers {version('verifiers')}", *hashes])

    def load(self) -> None:
        """Load the environments in a process that may still write files."""
        for source in self._sources:
            _environment(source)

    def score(self, prompt: Prompt, response: str) -> Score:
        """Raises ValueError for a prompt that is not the environment's, RuntimeError if a rubric function failed."""
        environment, environment_rows = _environment(prompt.source)
        row = environment_rows[index_of(prompt)]
        if prompt_text(row["prompt"]) not in prompt.text:
            raise ValueError(f"the environment's row {prompt.prompt_id} is another one than the prompt's")
        # Rubrics catch the exceptions of their functions, log them, and count 0.
        warnings: SimpleQueue[logging.LogRecord] = SimpleQueue()
        handler = QueueHandler(warnings)
        handler.setLevel(logging.WARNING)
        logging.getLogger("verifiers").addHandler(handler)
        try:
            state = asyncio.run(_final_state(environment, row, response))
        finally:
            logging.getLogger("verifiers").removeHandler(handler)
        if not warnings.empty():
            raise RuntimeError(warnings.get().getMessage())
        metrics = {name: float(value) for name, value in state["metrics"].items()}
        return Score(reward=float(state["reward"]), components=metrics)


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


def _installed_sources(package: str, sources: Sequence[str]) -> list[str]:
    """Return the sources of the package. Raises InputError if it is not installed."""
    check_installed(package, EXTRAS[package], f"scoring.reward {package}")
    return [source for source in sources if PromptSource.parse(source).package == package]


def _parse(source: str, package: str) -> PromptSource:
    parsed = PromptSource.parse(source)
    if parsed.package != package:
        raise ValueError(f'the prompt is from "{source}"; expected a source {package}:NAME')
    return parsed


@functools.cache
def _dataset(source: str) -> Any:
    task = _parse(source, "reasoning_gym")
    return open_dataset(task.name, task.arguments)


@functools.lru_cache(maxsize=_CACHED_ENTRIES)
def _entry(source: str, index: int) -> tuple[Any, dict[str, Any]]:
    """Return the data set and its entry. Cached: a group's responses follow each other."""
    dataset = _dataset(source)
    return dataset, entry(dataset, index)


@functools.cache
def _environment(source: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return the environment and its rows."""
    parsed = _parse(source, "verifiers")
    environment = open_environment(parsed.name, parsed.arguments)
    return environment, rows(environment, parsed.name)
