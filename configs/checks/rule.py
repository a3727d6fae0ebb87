"""A rule that settings break together, and the sentence about it.

generation.engine_args is {"max_model_len": 64} and generation.engine is "transformers"; expected no arguments, …
"""

import json
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.errors import UserError

if TYPE_CHECKING:
    from configs.schema import RunConfig

_LONGEST_SHOWN = 80


class Rule(NamedTuple):
    """Settings that can't be combined."""

    keys: str
    """Dotted keys, separated by blanks; the one to change is first."""
    is_broken: Callable[["RunConfig"], bool]
    expected: str | Callable[["RunConfig"], str]
    """A right value of the first key, and why."""


def broken(rules: Sequence[Rule], run: "RunConfig", source: str, config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each of the rules that `config`, of this source, breaks."""
    for rule in rules:
        if rule.is_broken(config):
            key, *contradicted = rule.keys.split()
            read = " and ".join(
                [
                    _shown(config, key),
                    *(f"{where_set(run, source, other)} is {_shown(config, other)}" for other in contradicted),
                ]
            )
            expected = rule.expected if isinstance(rule.expected, str) else rule.expected(config)
            yield UserError(key=where_set(run, source, key), read=read, expected=expected)


def where_set(run: "RunConfig", source: str, key: str) -> str:
    """The name of the key whose value the source has: its own, or the run's that it inherits."""
    section, name, *_ = *key.split("."), ""
    own = getattr(run.sources.get(source), section, None)
    return f"sources.{source}.{key}" if own is not None and name in own.model_fields_set else key


def _shown(config: "RunConfig", key: str) -> str:
    value: Any = attrgetter(key)(config)
    text = json.dumps(getattr(value, "name", value), ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"
