"""Writes a plan's config, as a file that `millrace run` takes."""

from pathlib import Path

import yaml

from flows.planning.formatting import headline
from millrace.errors import InputError
from millrace.planning.plan import Plan


def write_config(plan: Plan, path: Path) -> None:
    """Writes the chosen config to `path`. Raises InputError if it does not fit, or the file can't be written."""
    chosen = plan.chosen
    if chosen.outcome is None:
        raise InputError(f"{path} was not written, because the config {chosen.reason}")
    values = plan.config().model_dump(mode="json", exclude_unset=True)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    try:
        path.write_text(f"# Made by `millrace plan`: {headline(plan)}.\n{text}", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path}: can't be written ({error.strerror}); expected a path for the planned config"
        ) from error
