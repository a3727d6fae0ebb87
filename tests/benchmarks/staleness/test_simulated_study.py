"""The simulated study: adaptive control is near the best fixed bound of each phase, and before every one over all."""

import pytest

from benchmarks.staleness_study.comparison import ADAPTIVE
from benchmarks.staleness_study.simulated import SHAPES, Shape, study


@pytest.mark.extended
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=shape.name, marks=() if shape is SHAPES[0] else pytest.mark.extended)
        for shape in SHAPES[:2]
    ],
)
def test_adaptive_control_is_near_the_best_bound_of_each_phase_and_ends_before_all_fixed_ones(shape: Shape) -> None:
    rows = study(shape, steps=120, seeds=range(1))
    fixed = [row for row in rows if row["bound"] != ADAPTIVE]
    (adaptive,) = (row for row in rows if row["bound"] == ADAPTIVE)
    assert all(min(row["lost"][phase] for row in fixed) == 0 for phase in range(7))
    # The steps in which it finds out weigh twice as much as in the study, whose phases are twice as long.
    assert max(adaptive["lost"]) < 0.15
    assert adaptive["seconds"] < min(row["seconds"] for row in fixed)
    assert all(max(row["lost"]) > 0.1 for row in fixed)
