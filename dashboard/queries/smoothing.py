"""Noisy lines made legible: the mean over a window, and a band that half of the window's values are in."""

from typing import NamedTuple

import numpy as np

from dashboard.queries.series import Line

_LOW, _HIGH = 0.25, 0.75


class Smoothed(NamedTuple):
    """A line and the band around it; all three have the same x."""

    mean: Line
    low: Line
    """A quarter of the window's values are below."""
    high: Line
    """A quarter are above."""


def trailing_mean(line: Line, window: int) -> Line:
    """The mean of the last `window` points up to each; of fewer at first."""
    sums = np.cumsum(np.append(0.0, line.y))
    ends = np.arange(1, len(line.y) + 1)
    starts = np.maximum(0, ends - window)
    return Line(line.x, (sums[ends] - sums[starts]) / (ends - starts))


def smooth(line: Line, window: int, most: int) -> Smoothed:
    """The trailing mean over `window` points and its band, at `most` points of the line at most, the last among them.

    Points that are not finite are left out.
    """
    finite = np.isfinite(line.y)
    line = Line(line.x[finite], line.y[finite])
    size = len(line.x)
    at = (
        np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64)) if size else np.empty(0, np.int64)
    )
    mean = trailing_mean(line, window)
    x = line.x[at]
    if window == 1 or not size:
        same = Line(x, line.y[at])
        return Smoothed(same, same, same)
    # The first windows are cut off; the others have one size, and are sorted at once.
    early, late = at[at < window - 1], at[at >= window - 1]
    bands = [np.quantile(line.y[: end + 1], (_LOW, _HIGH)) for end in early]
    whole = line.y[late[:, None] - np.arange(window)]
    low, high = np.column_stack([*bands, np.quantile(whole, (_LOW, _HIGH), axis=1)])
    return Smoothed(Line(x, mean.y[at]), Line(x, low), Line(x, high))
