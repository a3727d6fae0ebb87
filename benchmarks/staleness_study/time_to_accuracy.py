"""How long a campaign took to an accuracy, from its evaluations."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

EVALUATIONS = 3
"""One evaluation alone is ± 0.1 from its neighbours: the first one above a target would say little."""

Curve = Sequence[tuple[float, float]]
"""(seconds, held-out accuracy), in order."""


def smoothed(curve: Curve) -> list[tuple[float, float]]:
    """At each evaluation, the mean of it and the two before."""
    return [
        (curve[end - 1][0], statistics.fmean(accuracy for _, accuracy in curve[end - EVALUATIONS : end]))
        for end in range(EVALUATIONS, len(curve) + 1)
    ]


def reached(curve: Curve, target: float) -> float | None:
    """When a curve first comes to the target, between two points of it; None if it never does."""
    for (t, accuracy), (t_next, accuracy_next) in pairwise(curve):
        if accuracy < target <= accuracy_next:
            return t + (t_next - t) * (target - accuracy) / (accuracy_next - accuracy)
    return None
