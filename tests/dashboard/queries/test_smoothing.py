"""Means over a window, and the band around them."""

import numpy as np
import pytest

from dashboard.queries.series import NO_LINE, Line
from dashboard.queries.smoothing import smooth


def line(y: np.ndarray) -> Line:
    return Line(np.arange(1.0, len(y) + 1), y)


def test_the_band_holds_half_of_the_noise_and_the_mean_is_inside() -> None:
    noise = np.random.default_rng(3).normal(size=2000)
    mean, low, high = smooth(line(noise), 200, 250)
    assert len(mean.x) == len(low.x) == len(high.x) == 250
    assert (mean.x[0], mean.x[-1]) == (1.0, 2000.0)
    assert np.all(low.y <= high.y)
    late = mean.x >= 200
    assert mean.y[late] == pytest.approx(0.0, abs=0.25)
    assert high.y[late] - low.y[late] == pytest.approx(2 * 0.6745, abs=0.5)


def test_what_is_not_finite_is_left_out_and_no_line_stays_none() -> None:
    mean, _, _ = smooth(line(np.array([1.0, np.nan, 3.0])), 2, 250)
    assert (mean.x.tolist(), mean.y.tolist()) == ([1.0, 3.0], [1.0, 2.0])
    assert len(smooth(NO_LINE, 10, 250).mean.x) == 0
