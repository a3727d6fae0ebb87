"""Writes a plan's config, as a file that `millrace run` takes."""

from pathlib import Path

import yaml

from flows.planning.formatting import headline
from millrace.errors import InputError
from millrace.planning.plan import Plan


def write_config(plan: Plan, path: Path) -> None:
    """Writes the chosen config to `path`. Raises InputError if it does not fit, or the file can't be written."""
    chosen, outcome = plan.chosen, plan.chosen.outcome
    if outcome is None:
        raise InputError(f"{path} was not written, because the config {chosen.reason}")
    values = plan.config().model_dump(mode="json", exclude_unset=True)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    comment = (
        f"# Made by `millrace plan`: {headline(plan)}.\n"
        f"# Predicted: {outcome.step_seconds:.4g} s per step, {outcome.tokens_per_second:,.4g} tokens per second, "
        f"mean staleness {outcome.staleness_mean:.2f}, {outcome.dropped_share:.1%} of the rollouts dropped.\n"
    )
    try:
        path.write_text(comment + text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path}: can't be written ({error.strerror}); expected a path for the planned config"
        ) from error
