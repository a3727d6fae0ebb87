"""Adaptive control beside the fixed bounds of a study: seconds to the target, and seconds per step in each phase."""

import math
from collections.abc import Sequence

from benchmarks.staleness_study.campaigns import Row
from benchmarks.staleness_study.too_old import interval

ADAPTIVE = "adaptive"
"""The bound of a campaign with adaptive control."""


def against_best(cells: Sequence[Row]) -> list[Row]:
    """For each task and loss: the fixed bound that came to the target first, and how adaptive control compares.

    `cells` are those of `medians`. The ratio is adaptive ÷ best fixed, a geometric mean over the seeds, with the 95 %
    interval of Student's t over their logarithms if there are several; it is None where a seed of either did not reach
    the target.
    """
    found = []
    for task, loss in dict.fromkeys((cell["task"], cell["loss"]) for cell in cells):
        mine = [cell for cell in cells if (cell["task"], cell["loss"]) == (task, loss)]
        fixed = [cell for cell in mine if cell["bound"] != ADAPTIVE and cell["reached"] == cell["seeds"]]
        adaptive = next((cell for cell in mine if cell["bound"] == ADAPTIVE), None)
        if not fixed or adaptive is None:
            continue
        best = min(fixed, key=lambda cell: float(cell["seconds_to_target"]))
        row: Row = {"task": task, "loss": loss, "best": best["bound"], "ratio": None, "interval": None}
        if adaptive["reached"] == adaptive["seeds"] == best["seeds"]:
            pairs = zip(adaptive["all_seconds_to_target"], best["all_seconds_to_target"], strict=True)
            logarithms = [math.log(one / other) for one, other in pairs]
            row["ratio"] = math.exp(sum(logarithms) / len(logarithms))
            if len(logarithms) > 1:
                low, high = interval(logarithms, None)
                row["interval"] = (math.exp(low), math.exp(high))
        found.append(row)
    return found


def phase_losses(cells: Sequence[Row]) -> list[Row]:
    """For each cell: seconds per step of each phase ÷ those of the best fixed bound in that phase, and the largest."""
    found = []
    for cell in cells:
        same = [one for one in cells if (one["task"], one["loss"]) == (cell["task"], cell["loss"])]
        fixed = [one for one in same if one["bound"] != ADAPTIVE]
        ratios = [
            phase["seconds_per_step"] / min(one["phases"][k]["seconds_per_step"] for one in fixed)
            for k, phase in enumerate(cell["phases"])
        ]
        key = {name: cell[name] for name in ("task", "loss", "bound")}
        found.append({**key, "ratios": ratios, "largest": max(ratios)})
    return found
