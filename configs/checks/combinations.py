"""Settings that are valid alone but not together. Each mistake names all keys.

A rule is a line of a table: the keys, when they contradict each other, and what would be right. The first key is the
one to change. Its value is shown, then the others'.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from configs.checks.learning import LEARNING_RULES
from configs.checks.names import (
    half_schedules,
    penalties_without_reference,
    rewards_without_entries,
    unasked_tasks,
    wrong_names,
    wrong_teachers,
)
from configs.checks.placement import DEVICE_RULES, PLACEMENT_RULES
from configs.checks.rule import broken
from configs.errors import UserError
from configs.stored import DEFAULT_SOURCE

if TYPE_CHECKING:
    from configs.schema import RunConfig

_RULES = (*LEARNING_RULES, *PLACEMENT_RULES)


def impossible_combinations(config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each rule that `config`, or a source of it, breaks."""
    mistakes: dict[tuple[str | None, str], UserError] = {}
    for name, of_source in config.by_source().items():
        for mistake in (*broken(_RULES, config, name, of_source), *rewards_without_entries(config, name, of_source)):
            # Sources that inherit the same keys break a rule alike.
            mistakes[mistake.key, mistake.read] = mistake
    yield from mistakes.values()
    yield from broken(DEVICE_RULES, config, DEFAULT_SOURCE, config)
    yield from unasked_tasks(config)
    yield from half_schedules(config)
    yield from penalties_without_reference(config)
    yield from wrong_names(config)
    yield from wrong_teachers(config)
