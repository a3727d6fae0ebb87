"""Packages that only some configs need, each brought by an extra of Millrace."""

from importlib.util import find_spec

from millrace.errors import InputError

EXTRAS = {"reasoning_gym": "reasoning-gym", "verifiers": "verifiers"}
"""Packages that list prompts and judge responses to them, each with the extra that installs it."""


def check_installed(package: str, extra: str, what: str) -> None:
    """Raises InputError saying that `what` asks for a package that is not there, and which extra brings it."""
    if find_spec(package) is None:
        raise InputError(
            f"{what}, but the package {package} is not installed; expected `.venv/bin/pip install -e '.[{extra}]'` to "
            "have been run once where Millrace is"
        )
