"""Costs found by least squares."""

import numpy as np
import pytest
from millrace.planning.fit.regression import fit_costs


def _columns(rows: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([np.ones(rows), rng.uniform(1, 100, rows), rng.uniform(0, 5, rows)], axis=1)


def test_costs_are_found_from_exact_times() -> None:
    columns = _columns(40)
    assert fit_costs(columns, columns @ [0.02, 0.003, 0.5]) == pytest.approx([0.02, 0.003, 0.5])


def test_a_few_outliers_change_little_but_their_own_sum() -> None:
    columns = _columns(400)
    seconds = columns @ np.array([0.02, 0.003, 0.5])
    seconds[::100] += 30
    found = fit_costs(columns, seconds)
    assert (columns @ found).sum() == pytest.approx(seconds.sum())
    assert found[2] / found[1] == pytest.approx(0.5 / 0.003, rel=0.05)


def test_no_cost_is_negative() -> None:
    columns = _columns(40)
    found = fit_costs(columns, columns @ [1.0, 0.01, 0.0] - 0.02 * columns[:, 2])
    assert (found >= 0).all()
    assert found[2] == 0
