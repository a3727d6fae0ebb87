"""What holds for configs as JSON too, as runs store them: keys that have another name today, the hash, the bound.

No pydantic here: readers of stored runs need no schema.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

RENAMED = {
    "model.bootstrap.slip_rate": "model.bootstrap.error_rate",
    "model.bootstrap.target_fluency": "model.bootstrap.target_imitation_rate",
}
"""Today's dotted key by the old one. A section may stand for all its keys."""


def current_key(key: str) -> str | None:
    """Today's name of a key that was renamed, else None."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return None


def with_current_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A stored config under today's keys; `config` itself is changed. A key that is there already keeps its value."""
    for old, new in RENAMED.items():
        section, _, name = old.rpartition(".")
        holder = _section(config, section)
        if holder is not None and name in holder:
            value = holder.pop(name)
            section, _, name = new.rpartition(".")
            target = _section(config, section, create=True)
            if target is not None:
                target.setdefault(name, value)
    return config


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One sentence per key that differs between two stored configs; a key that only one of them has is left out."""
    found: list[str] = []
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        if isinstance(old, dict) and isinstance(new, dict):
            found += changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name} was {json.dumps(old)} and is {json.dumps(new)}")
    return found


def put_key(config: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key. Where something else than a section is in its way, that stays for the validation to report."""
    section, _, name = key.rpartition(".")
    holder = _section(config, section, create=True)
    if holder is not None:
        holder[name] = value


def staleness_bound(mode: str, max_staleness: int) -> int:
    """The staleness bound in force in a pipeline mode, policy versions: 0 in sync mode, whatever is configured.

    So `--set pipeline.mode=sync` alone turns any asynchronous config into its synchronous baseline.
    """
    return 0 if mode == "sync" else max_staleness


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config's canonical JSON (sorted keys, no blanks), 64 hex digits."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _section(config: dict[str, Any], path: str, *, create: bool = False) -> dict[str, Any] | None:
    """The section at a dotted path, '' being the whole config; None where there is none."""
    for name in path.split(".") if path else ():
        below = config.setdefault(name, {}) if create else config.get(name)
        if not isinstance(below, dict):
            return None
        config = below
    return config
