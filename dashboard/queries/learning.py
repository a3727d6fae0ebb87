"""The trainer's step metrics and evaluation results, over policy versions."""

import numpy as np

from dashboard.queries.series import ChartLine, ascending, metric, over_versions, thin
from dashboard.read.model import Columns, RunData
from millrace.control.collapse import STEPS

TRAINER = "train-0"
RATIO_QUANTILES = ("p05", "p50", "p95", "max")
"""Quantiles of the importance ratio π/μ over a step's tokens, as the trainer names them."""


def measured(run: RunData, name: str) -> ChartLine:
    """Returns one of the trainer's metrics. Thinning averages neighbours, but keeps the maxima of `…_max`."""
    return thin(over_versions(run, TRAINER, name), largest=name.endswith("_max"))


def recent(run: RunData, name: str) -> float:
    """Returns the mean of one of the trainer's metrics over the last ten steps that have it; NaN without any."""
    values = metric(run, TRAINER, name)["value"][-STEPS:]
    return float(values.mean()) if len(values) else np.nan


def trained_shares(run: RunData) -> dict[str, float]:
    """Source of a mixture → its share of the trained groups; NaN before the first step."""
    groups = {source: metric(part, TRAINER, "groups_trained")["value"].sum() for source, part in run.by_source.items()}
    total = sum(groups.values()) or np.nan
    return {source: float(count / total) for source, count in groups.items()}


def source_weight(run: RunData) -> float:
    """Returns the weight in the newest block of groups, reduced if the source is solved; NaN before the first block.

    `run` holds the metrics of the source alone, as in `RunData.by_source`.
    """
    weights = metric(run, "generate-0", "source_weight")["value"]
    return float(weights[-1]) if len(weights) else np.nan


def is_measured(run: RunData, name: str) -> bool:
    """Whether the trainer has recorded the metric."""
    return len(metric(run, TRAINER, name)["value"]) > 0


def accuracy(run: RunData) -> ChartLine:
    """Held-out accuracy of each evaluated version."""
    return _of(run.evaluations, "accuracy")


def accuracy_interval(run: RunData) -> tuple[ChartLine, ChartLine]:
    """Lower and upper ends of the accuracy's 95 % interval; NaN if unknown."""
    return _of(run.evaluations, "accuracy_low"), _of(run.evaluations, "accuracy_high")


def further_accuracies(run: RunData) -> dict[str, ChartLine]:
    """Name of a further evaluation set → accuracy."""
    return {name: _of(columns, "accuracy") for name, columns in run.evaluation_sets.items()}


def _of(evaluations: Columns, name: str) -> ChartLine:
    return thin(ascending(evaluations["policy_version"], evaluations[name]))
