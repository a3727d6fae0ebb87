"""An advantage of your own, named by its import path."""

import functools
from collections.abc import Callable, Sequence
from math import isfinite

from millrace.errors import InputError
from millrace.rewards.import_path import imported_function

Rewards = Sequence[Sequence[float]]
"""[groups] of [members]."""
Estimator = Callable[[Rewards], list[list[float]]]


@functools.cache
def own_advantage(path: str) -> Estimator:
    """The estimator `package.module:function`, called as `function(rewards)`; what it returns is checked.

    It gets a list of rewards per group of the batch, shaped by length if that is configured, and returns advantages in
    the same shape. Tries it out. Raises InputError if it can't be imported or called, or returns something else; so
    does the estimator.
    """
    function = imported_function("training.advantage", path, ("rewards",))

    def estimate(groups: Rewards) -> list[list[float]]:
        try:
            found = function([list(group) for group in groups])
        except Exception as error:  # whatever a user's function raises
            raise _wrong(path, f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        return _checked(path, found, groups)

    estimate([[1.0, 0.0], [0.5, 0.5, 0.5]])
    return estimate


def _checked(path: str, found: object, groups: Rewards) -> list[list[float]]:
    rows = _items(path, found, "the batch", len(groups), "group")
    return [
        [_number(path, value) for value in _items(path, row, f"group {i}", len(group), "reward")]
        for i, (row, group) in enumerate(zip(rows, groups, strict=True))
    ]


def _items(path: str, found: object, where: str, expected: int, per: str) -> list[object]:
    try:
        items: list[object] = list(found)  # type: ignore[call-overload]
    except TypeError:
        raise _wrong(path, f"of {where} it returned {type(found).__name__}; expected a list") from None
    if len(items) != expected:
        raise _wrong(path, f"of {where} it returned {len(items)} values; expected {expected}, one per {per}")
    return items


def _number(path: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _wrong(path, f"an advantage is of type {type(value).__name__}; expected a number") from None
    if not isfinite(number):
        raise _wrong(path, f"an advantage is {number}; expected a finite number")
    return number


def _wrong(path: str, what: str) -> InputError:
    return InputError(f'training.advantage is "{path}", which can\'t be used: {what}')
