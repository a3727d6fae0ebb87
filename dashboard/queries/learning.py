"""What the trainer measured at each step, and what evaluations found, over policy versions."""

from dashboard.data import RunData
from dashboard.queries.series import Line, ascending, over_versions, thin

TRAINER = "train-0"
RATIO_QUANTILES = ("p05", "p50", "p95", "max")
"""Quantiles of the importance ratio π/μ over a step's tokens, as the trainer names them."""


def measured(run: RunData, name: str) -> Line:
    """One of the trainer's measurements of a step, in the unit of its name; of a maximum, the largest of neighbours."""
    return thin(over_versions(run, TRAINER, name), largest=name.endswith("_max"))


def accuracy(run: RunData) -> Line:
    """Share of held-out prompts answered right, of each version evaluated."""
    return thin(ascending(run.evaluations["policy_version"], run.evaluations["accuracy"]))
