"""A user's function as a reward, named by its import path."""

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

    def load(self) -> None:
        """Import the function. Raises InputError if it can't be imported, or can't be called with four arguments."""
        self._function: Callable[..., object]
        self._function = imported_function(self._key, self.name, ("prompt", "response", "answer", "meta"))
        digest = source_hash(self.name)
        if digest is None:
            raise unusable(self._key, self.name, "a module with a file, whose hash can be recorded with the scores")
        self.version = f"{self.name} {digest}"

    def score(self, prompt: Prompt, response: str) -> Score:
        """Raises the function's exceptions, and TypeError if it returned no reward."""
        meta = asdict(prompt)
        text, answer = meta.pop("text"), meta.pop("answer")
        result = self._function(text, response, answer, meta)
        values = dict(result) if isinstance(result, Mapping) else {"reward": result}
        key = "reward" if "reward" in values else "score"
        if key not in values:
            raise TypeError(f"the function returned {sorted(values)}; expected a dict with the key reward or score")
        numbers = {str(name): _number(str(name), value) for name, value in values.items()}
        return Score(reward=numbers.pop(key), components=numbers)


def _number(name: str, value: object) -> float:
    if not hasattr(value, "__float__") or not math.isfinite(number := float(value)):
        raise TypeError(f"{name} is {value!r}; expected a finite number")
    return number
