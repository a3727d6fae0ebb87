"""What an attempt came from, for people: the preset nearest to its config, and Prefect's page on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Recorded with each start of a run. Nothing is decided from it, and older records have none."""

    preset: str | None = None
    """Name of the file in configs/presets that has the fewest settings other than the attempt's, without `.yaml`."""
    changes: dict[str, list[Any]] = field(default_factory=dict)
    """Dotted key → [the preset's value, the attempt's], for each setting in which the two differ."""
    flow_run: str | None = None
    """Address of the flow run in the Prefect UI; None without one."""


UNKNOWN = Origin()
"""Nothing was recorded."""


def parse_origin(values: Mapping[str, Any]) -> Origin:
    """The origin in a record's JSON. Raises TypeError if it is none."""
    origin = Origin(**values)
    names = [name for name in (origin.preset, origin.flow_run) if name is not None]
    if not isinstance(origin.changes, dict) or not all(isinstance(name, str) for name in names):
        raise TypeError("origin: expected a preset, its changes and a flow run")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in origin.changes.values()):
        raise TypeError("origin.changes: expected a pair of values for each setting")
    return origin
