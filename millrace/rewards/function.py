"""A function of your own, named by its import path."""

import hashlib
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from millrace.errors import InputError
from millrace.rewards.base import Reward, Score
from millrace.types import Prompt


class PythonReward(Reward):
    """Calls `package.module:function` as `function(prompt, response, answer, meta)`, by position.

    `prompt`, `response` and `answer` are text; `meta` is a dict with the prompt's `prompt_id` and `source`. It returns
    the reward, a finite number, or a dict of numbers with the key `reward`; its other keys are components. An exception
    is an error. Each response gets its own process, forked from one that has imported the module, so no response sees
    what another changed.
    """

    name = "python"
    isolated = True
    fresh = True

    def __init__(self, *, function: str | None = None) -> None:
        """`function`: `package.module:function`. Raises InputError for anything else."""
        module, colon, attribute = (function or "").partition(":")
        if function is None or not (module and colon and attribute):
            raise self._input_error(function, "package.module:function")
        self._path = function
        self._function: Callable[..., object] | None = None

    def load(self) -> None:
        """Import the function. Raises InputError if it can't be imported, or can't be called with four arguments."""
        module_name, _, attribute = self._path.partition(":")
        try:
            module = importlib.import_module(module_name)
        # Importing a module may raise anything, SystemExit too.
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._input_error(self._path, f"a module that can be imported ({reason})") from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise self._input_error(self._path, f'a function "{attribute}" in {module_name}')
        self._check_signature(function)
        self.version = f"{self._path} {_source_hash(self._path, module.__file__)}"
        self._function = function

    def score(self, prompt: Prompt, response: str) -> Score:
        """Raises what the function raises, and TypeError or ValueError if it returned no reward."""
        assert self._function is not None, "load() comes first"
        meta = asdict(prompt)
        text, answer = meta.pop("text"), meta.pop("answer")
        returned = self._function(text, response, answer, meta)
        if not isinstance(returned, Mapping):
            return Score(reward=_number("reward", returned))
        values = {str(name): _number(str(name), value) for name, value in returned.items()}
        if "reward" not in values:
            raise ValueError(f"the function returned {sorted(values)}; expected a dict with the key reward")
        return Score(reward=values.pop("reward"), components=values)

    def _check_signature(self, function: Callable[..., object]) -> None:
        try:
            inspect.signature(function).bind("", "", "", {})
        except (TypeError, ValueError) as error:
            raise self._input_error(self._path, f"a function of (prompt, response, answer, meta) ({error})") from error
        if inspect.iscoroutinefunction(function):
            raise self._input_error(self._path, "a function that is not async")

    @staticmethod
    def _input_error(function: str | None, expected: str) -> InputError:
        shown = "null" if function is None else f'"{function}"'
        return InputError(f"scoring.function is {shown}; expected {expected}")


def _source_hash(path: str, file: str | None) -> str:
    """SHA-256 of the whole module, since the function may call others in it; 12 hex digits."""
    if file is None:
        raise PythonReward._input_error(path, "a module with a file, whose hash can be recorded with the scores")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise TypeError(f"{name} is of type {type(value).__name__}; expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; expected a finite number")
    return number
