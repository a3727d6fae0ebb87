"""Configs as JSON, as runs store them: their hash, their differences, the staleness bound.

No pydantic here: readers of stored runs need no schema.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

DEFAULT_SOURCE = "default"
"""The name of the only source of a run that names none."""
_UNSET = object()


@dataclass(frozen=True)
class ScorerPools:
    """Which scorers score which sources: those that sources share, and those of a source that has its own.

    The name of a pool is that of its streams: the run's `scoring.reward`, or `<reward>@<source>`.
    """

    replicas: Mapping[str, int]
    """Pool → number of its scorers; the shared pool is the first."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Source → its pool, if it has one of its own."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The pools of a run with this config. Raises KeyError, TypeError or AttributeError if that is damaged."""
        shared: str = config["scoring"]["reward"]
        sources = config.get("sources", {})
        replicas = {name: source.get("scoring", {}).get("replicas") for name, source in sources.items()}
        own = {name: f"{shared}@{name}" for name, count in replicas.items() if count is not None}
        return cls({shared: config["scoring"]["replicas"], **{own[name]: replicas[name] for name in own}}, own)

    @property
    def total(self) -> int:
        """Number of scorers of all pools."""
        return sum(self.replicas.values())

    def of_source(self, source: str) -> str:
        """The pool that scores this source."""
        return self.own.get(source, next(iter(self.replicas)))

    def scorer(self, replica: int) -> tuple[str, int]:
        """The pool of a replica of the stage, and its number in that; the shared pool has the first replicas."""
        for pool, count in self.replicas.items():
            if replica < count:
                return pool, replica
            replica -= count
        raise ValueError(f"there are only {self.total} scorers")


def changed_keys(old_config: Mapping[str, Any], new_config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One sentence per key that differs between two stored configs.

    A key that only one of them has is left out, except of sources, which are stored with those keys that they set.
    """
    changes: list[str] = []
    both = set.union if prefix.startswith("sources.") else set.intersection
    for name in sorted(both(set(old_config), set(new_config))):
        old, new = old_config.get(name, _UNSET), new_config.get(name, _UNSET)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            was, now = ("not set" if value is _UNSET else json.dumps(value) for value in (old, new))
            changes.append(f"{prefix}{name} was {was} and is {now}")
    return changes


def put_key(config: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key. Where something else than a section is in its way, that stays for the validation to report."""
    *path, name = key.split(".")
    for part in path:
        below = config.setdefault(part, {})
        if isinstance(below, str):
            # A choice, such as a loss, by its name alone; now it gets a parameter.
            below = config[part] = {"name": below}
        if not isinstance(below, dict):
            return
        config = below
    config[name] = value


def staleness_bound(mode: str, max_staleness: int) -> int:
    """The staleness bound in force in a pipeline mode, policy versions: 0 in sync mode, whatever is configured.

    So `--set pipeline.mode=sync` alone turns any asynchronous config into its synchronous baseline.
    """
    return 0 if mode == "sync" else max_staleness


def bounds_admission_only(config: Mapping[str, Any]) -> bool:
    """Whether the staleness bound limits admission only, so that a trained token may be older than the bound."""
    is_sync = config.get("pipeline", {}).get("mode") == "sync"
    return not is_sync and bool(config.get("staleness", {}).get("too_old") == "keep")


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config's canonical JSON (sorted keys, no blanks), 64 hex digits."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
