"""The trainer's metrics of each step, and evaluation results, over policy versions."""

from dashboard.queries.series import Line, ascending, metric, over_versions, thin
from dashboard.read.model import Columns, RunData

TRAINER = "train-0"
RATIO_QUANTILES = ("p05", "p50", "p95", "max")
"""Quantiles of the importance ratio π/μ over a step's tokens, as the trainer names them."""


def measured(run: RunData, name: str) -> Line:
    """One of the trainer's metrics, in the unit of its name. Thinning averages neighbours, but keeps maxima."""
    return thin(over_versions(run, TRAINER, name), largest=name.endswith("_max"))


def is_measured(run: RunData, name: str) -> bool:
    """Whether the trainer has measured it."""
    return len(metric(run, TRAINER, name)["value"]) > 0


def accuracy(run: RunData) -> Line:
    """Share of held-out prompts answered correctly, for each version evaluated."""
    return _of(run.evaluations, "accuracy")


def accuracy_interval(run: RunData) -> tuple[Line, Line]:
    """The lower and upper ends of its 95 % interval; NaN if unknown."""
    return _of(run.evaluations, "accuracy_low"), _of(run.evaluations, "accuracy_high")


def further_accuracies(run: RunData) -> dict[str, Line]:
    """The same share for each further evaluation set, by its name."""
    return {name: _of(columns, "accuracy") for name, columns in run.evaluation_sets.items()}


def _of(evaluations: Columns, name: str) -> Line:
    return thin(ascending(evaluations["policy_version"], evaluations[name]))
