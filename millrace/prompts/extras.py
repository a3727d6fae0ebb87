"""Optional packages: each is installed by an extra of Millrace."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from configs.prompts import PromptsConfig
from millrace.errors import MissingExtra

EXTRAS = {"reasoning_gym": "reasoning-gym", "verifiers": "verifiers"}
"""Packages that bring prompts and rewards for them, each with the extra that installs it."""


def package_of(source: str) -> str | None:
    """The package that a config's prompt source names; None for a file, a folder or `arithmetic`."""
    package, colon, _ = source.partition(":")
    return package if colon and package in EXTRAS else None


def package_options(prompts: PromptsConfig, package: str) -> Mapping[str, Any]:
    """The package's section of the config, as plain JSON."""
    options: dict[str, Any] = getattr(prompts, package).model_dump()
    return options


def check_installed(package: str, extra: str, what: str) -> None:
    """Raises MissingExtra if `package` is not installed. `what` is the setting that needs it."""
    if find_spec(package) is None:
        raise MissingExtra(what, package, extra)
