"""A user's function, named in a config by its import path, and such a function as a reward."""

import hashlib
import importlib
import importlib.util
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millrace.errors import InputError
from millrace.forking.process_settings import working_folder_first
from millrace.rewards.base import Reward, Score, failed
from millrace.types import Prompt

_KINDS_WITHOUT_RESULT = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)


class PythonReward(Reward):
    """Calls `package.module:function` as `function(prompt, response, answer, meta)`, by position.

    `prompt`, `response` and `answer` are text; `meta` is a dict with the prompt's `prompt_id` and `source`. It returns
    the reward, a finite number, or a dict of numbers with the key `reward`, or else `score`; its other keys are
    components. An exception is an error. Each response gets its own process, forked from one that has imported the
    module, so no response sees what another changed.
    """

    isolated = True
    fresh = True

    def __init__(self, path: str, *, key: str = "scoring.reward") -> None:
        """`path`: `package.module:function`; `key`: the setting that names it."""
        self.name = path
        self._key = key

    def load(self) -> None:
        """Import the function. Raises InputError if it can't be imported, or can't be called with four arguments."""
        self._function: Callable[..., object]
        self._function = imported_function(self._key, self.name, ("prompt", "response", "answer", "meta"))
        digest = source_hash(self.name)
        if digest is None:
            raise _unusable(self._key, self.name, "a module with a file, whose hash can be recorded with the scores")
        self.version = f"{self.name} {digest}"

    def score(self, prompt: Prompt, response: str) -> Score:
        """An exception of the function is an error with its place. Raises TypeError if it returned no reward."""
        meta = asdict(prompt)
        text, answer = meta.pop("text"), meta.pop("answer")
        try:
            result = self._function(text, response, answer, meta)
        except BaseException as error:  # noqa: BLE001 — as in `safe_score`
            return failed(f"{_place(error)}{type(error).__name__}: {error}")
        values = dict(result) if isinstance(result, Mapping) else {"reward": result}
        key = "reward" if "reward" in values else "score"
        if key not in values:
            raise TypeError(f"the function returned {sorted(values)}; expected a dict with the key reward or score")
        numbers = {str(name): _number(str(name), value) for name, value in values.items()}
        return Score(reward=numbers.pop(key), components=numbers)


def _place(error: BaseException) -> str:
    """The file of the function that was called, and the last line in it that the error passed: "rewards.py:3: "."""
    _, *frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [line for file, line in frames if file == frames[0][0]]
    return f"{frames[0][0].removeprefix(f'{Path.cwd()}/')}:{lines[-1]}: " if lines else ""


def _number(name: str, value: object) -> float:
    if not hasattr(value, "__float__") or not math.isfinite(number := float(value)):
        raise TypeError(f"{name} is {value!r}; expected a finite number")
    return number


def imported_function(key: str, path: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Import the function `package.module:function` that the config's `key` names; it is called by position.

    Raises InputError if its module can't be imported, or it can't be called with as many arguments as `parameters`.
    """
    module_name, _, attribute = path.partition(":")
    if not (module_name and attribute):
        raise _unusable(key, path, "package.module:function")
    try:
        with working_folder_first():
            module = importlib.import_module(module_name)
    # Importing a module may raise anything, SystemExit too.
    except BaseException as error:
        raise _unusable(key, path, f"a module that can be imported ({type(error).__name__}: {error})") from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise _unusable(key, path, f'a function "{attribute}" in {module_name}')
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        raise _unusable(key, path, f"a function of ({', '.join(parameters)}) ({error})") from error
    if any(is_kind(function) for is_kind in _KINDS_WITHOUT_RESULT):
        raise _unusable(key, path, "a function that returns its result: neither async nor a generator")
    return function


def source_hash(path: str) -> str | None:
    """Return the SHA-256 of the module's file and its neighbors in a package, 12 hex digits; None if it has no file.

    The neighbors count because the function may call others in them.
    """
    with working_folder_first():
        try:
            spec = importlib.util.find_spec(path.partition(":")[0])
        except (ImportError, ValueError):
            return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    file = Path(spec.origin)
    files = sorted(file.parent.glob("*.py")) if "." in spec.name or file.name == "__init__.py" else [file]
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]


def _unusable(key: str, path: str, expected: str) -> InputError:
    return InputError(f'"{path}"', key=key, expected=expected)
