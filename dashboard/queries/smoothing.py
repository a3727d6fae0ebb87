"""Smoothing of noisy lines: the mean over a window, and a band with half of the window's values."""

from typing import NamedTuple

import numpy as np

from dashboard.queries.series import ChartLine

_LOW, _HIGH = 0.25, 0.75


class Smoothed(NamedTuple):
    """A smoothed line and the band around it, at the same x."""

    mean: ChartLine
    low: ChartLine
    """Lower quartile of the window's values."""
    high: ChartLine
    """Upper quartile."""


def trailing_mean(line: ChartLine, window: int) -> ChartLine:
    """Returns the mean of the last `window` points up to each point; of fewer at the start."""
    sums = np.cumsum(np.append(0.0, line.y))
    ends = np.arange(1, len(line.y) + 1)
    starts = np.maximum(0, ends - window)
    return ChartLine(line.x, (sums[ends] - sums[starts]) / (ends - starts))


def smooth(line: ChartLine, window: int, most: int) -> Smoothed:
    """Returns the trailing mean over `window` points and its band, at no more than `most` points, including the last.

    Skips points that are not finite.
    """
    finite = np.isfinite(line.y)
    line = ChartLine(line.x[finite], line.y[finite])
    size = len(line.x)
    at = (
        np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64)) if size else np.empty(0, np.int64)
    )
    mean = trailing_mean(line, window)
    x = line.x[at]
    if window == 1 or not size:
        same = ChartLine(x, line.y[at])
        return Smoothed(same, same, same)
    # The first windows are shorter. The others have the same size and are sorted together.
    early, late = at[at < window - 1], at[at >= window - 1]
    bands = [np.quantile(line.y[: end + 1], (_LOW, _HIGH)) for end in early]
    whole = line.y[late[:, None] - np.arange(window)]
    low, high = np.column_stack([*bands, np.quantile(whole, (_LOW, _HIGH), axis=1)])
    return Smoothed(ChartLine(x, mean.y[at]), ChartLine(x, low), ChartLine(x, high))
