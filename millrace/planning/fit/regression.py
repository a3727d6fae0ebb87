"""Least squares whose coefficients are costs: none is negative, and a few outliers count little."""

from itertools import combinations

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_ROUNDS = 8
_OUTLIER = 3.0
"""Residuals beyond this many times the median one count less, the further the less."""


def fit_costs(columns: _Floats, seconds: _Floats) -> _Floats:
    """[C] coefficients c ≥ 0 with `columns` [N, C] · c ≈ `seconds` [N], and the same sum over all rows."""
    weights = np.ones(len(seconds))
    found = _non_negative(columns, seconds)
    for _ in range(_ROUNDS):
        residuals = np.abs(seconds - columns @ found)
        scale = _OUTLIER * max(float(np.median(residuals)), 1e-12)
        weights = 1 / np.maximum(1.0, residuals / scale)
        root = np.sqrt(weights)
        found = _non_negative(columns * root[:, None], seconds * root)
    predicted = float((columns @ found).sum())
    return found * (float(seconds.sum()) / predicted) if predicted > 0 else found


def _non_negative(columns: _Floats, seconds: _Floats) -> _Floats:
    """The best non-negative coefficients: of all choices of columns, as there are few."""
    num = columns.shape[1]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-12)
    gram, moment = (columns / scale).T @ (columns / scale), (columns / scale).T @ seconds
    best, best_gain = np.zeros(num), 0.0
    for size in range(1, num + 1):
        for chosen in combinations(range(num), size):
            at = list(chosen)
            solved = np.linalg.lstsq(gram[np.ix_(at, at)], moment[at], rcond=1e-9)[0]
            # By how much it lowers the sum of squares.
            gain = float(2 * solved @ moment[at] - solved @ gram[np.ix_(at, at)] @ solved)
            if (solved >= 0).all() and gain > best_gain * (1 + 1e-9):
                best = np.zeros(num)
                best[at], best_gain = solved, gain
    scaled: _Floats = best / scale
    return scaled
