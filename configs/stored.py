"""Configs as JSON, as runs store them: their hash, their differences, the staleness bound.

No pydantic here: readers of stored runs need no schema.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DEFAULT_SOURCE = "default"
"""The name of the only source of a run that names none."""
_UNSET = object()


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


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config's canonical JSON (sorted keys, no blanks), 64 hex digits."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
