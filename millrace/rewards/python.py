"""A Python function of one's own, named by its import path."""

import hashlib
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millrace.errors import InputError
from millrace.rewards.base import Reward, Score
from millrace.types import Prompt


class PythonReward(Reward):
    """What the function `package.module:function` says: `function(prompt, response, answer, meta)`, by position.

    `prompt`, `response` and `answer` are text; `meta` is a dict of what else is known of the prompt: `prompt_id`,
    `source`. It returns the reward, a finite number, or a dict of numbers with the key `reward` whose other keys are
    components. What it raises is an error. Each response is judged by a process of its own, forked from one that has
    imported the module: what judging one changes, the next does not see.
    """

    name = "python"
    isolated = True
    fresh = True

    def __init__(self, *, function: str | None = None) -> None:
        """`function`: `package.module:function`. Raises InputError for anything else."""
        module, colon, attribute = (function or "").partition(":")
        if function is None or not (module and colon and attribute):
            raise self._mistake(function, "package.module:function")
        self._path = function
        self._function: Callable[..., object] | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        return {"function": self._path}

    def load(self) -> None:
        """Imports the function. Raises InputError for what can't be imported, or called as it will be."""
        module_name, _, attribute = self._path.partition(":")
        try:
            module = importlib.import_module(module_name)
        # A module may end in any way while it is imported.
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._mistake(self._path, f"a module that can be imported ({reason})") from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise self._mistake(self._path, f'a function "{attribute}" in {module_name}')
        self._check_signature(function)
        self.version = f"{self._path} {_source_hash(self._path, module.__file__)}"
        self._function = function

    def score(self, prompt: Prompt, response: str) -> Score:
        """Judge by the function. Raises what it raises, TypeError and ValueError for what is no reward."""
        assert self._function is not None, "load() comes first"
        meta = asdict(prompt)
        text, answer = meta.pop("text"), meta.pop("answer")
        said = self._function(text, response, answer, meta)
        if not isinstance(said, Mapping):
            return Score(reward=_number("reward", said))
        values = {str(name): _number(str(name), value) for name, value in said.items()}
        if "reward" not in values:
            raise ValueError(f"the function returned {sorted(values)}; expected a dict with the key reward")
        return Score(reward=values.pop("reward"), components=values)

    def _check_signature(self, function: Callable[..., object]) -> None:
        try:
            inspect.signature(function).bind("", "", "", {})
        except (TypeError, ValueError) as error:
            raise self._mistake(self._path, f"a function of (prompt, response, answer, meta) ({error})") from error
        if inspect.iscoroutinefunction(function):
            raise self._mistake(self._path, "a function that is not async")

    @staticmethod
    def _mistake(function: str | None, expected: str) -> InputError:
        shown = "null" if function is None else f'"{function}"'
        return InputError(f"scoring.function is {shown}; expected {expected}")


def _source_hash(path: str, file: str | None) -> str:
    """Of the whole module, for what a function calls there judges too; 12 hex digits of SHA-256."""
    if file is None:
        raise PythonReward._mistake(path, "a module with a file, whose hash can be recorded with the scores")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise TypeError(f"{name} is of type {type(value).__name__}; expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; expected a finite number")
    return number
