"""The preset that a config is closest to, and the settings in which the two differ."""

from pathlib import Path
from typing import Any, NamedTuple

from configs.load import load_config
from configs.schema import RunConfig, dotted_fields
from configs.section import is_section

PRESETS = Path(__file__).parent / "presets"
_OWN = ("name", "storage.root")
"""Every run has its own."""
_KEYS = sorted(key for key, field in dotted_fields().items() if not is_section(field.annotation) and key not in _OWN)


class Nearest(NamedTuple):
    """A preset, and how a config differs from it."""

    preset: str
    """Name of its file, without `.yaml`."""
    changes: dict[str, list[Any]]
    """Dotted key → [the preset's value, the config's], plain JSON."""


def nearest_preset(config: RunConfig) -> Nearest:
    """The preset with the fewest settings other than the config's; the first by name among equals."""
    found = (Nearest(file.stem, _changes(load_config(file), config)) for file in sorted(PRESETS.glob("*.yaml")))
    return min(found, key=lambda nearest: len(nearest.changes))


def _changes(preset: RunConfig, config: RunConfig) -> dict[str, list[Any]]:
    before, after = preset.model_dump(mode="json"), config.model_dump(mode="json")
    pairs = {key: [_value(before, key), _value(after, key)] for key in _KEYS}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _value(config: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config
