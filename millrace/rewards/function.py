"""A function of your own, named by its import path."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict

from millrace.rewards.base import Reward, Score
from millrace.rewards.import_path import imported_function, source_hash, unusable
from millrace.types import Prompt


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
        self._function: Callable[..., object] | None = None

    def load(self) -> None:
        """Import the function. Raises InputError if it can't be imported, or can't be called with four arguments."""
        function = imported_function(self._key, self.name, ("prompt", "response", "answer", "meta"))
        found = source_hash(self.name)
        if found is None:
            raise unusable(self._key, self.name, "a module with a file, whose hash can be recorded with the scores")
        self.version = f"{self.name} {found}"
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
        key = "reward" if "reward" in values else "score"
        if key not in values:
            raise ValueError(f"the function returned {sorted(values)}; expected a dict with the key reward or score")
        return Score(reward=values.pop(key), components=values)


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise TypeError(f"{name} is of type {type(value).__name__}; expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; expected a finite number")
    return number
