"""A word-sized line chart, as an image in a data URL."""

from urllib.parse import quote

import numpy as np
from dash import html
from dash.development.base_component import Component

from dashboard.queries.series import ChartLine
from dashboard.views.colours import ORANGE

_WIDTH, _HEIGHT, _MARGIN = 96, 22, 2


def sparkline(line: ChartLine, name: str) -> Component:
    """Draws the line between its lowest and highest value; nothing for fewer than two points."""
    if len(line.x) < 2:
        return html.Span()
    x = _stretched(line.x, _WIDTH)
    y = _HEIGHT - _stretched(line.y, _HEIGHT)
    points = " ".join(f"{x_pixel:.0f},{y_pixel:.1f}" for x_pixel, y_pixel in zip(x, y, strict=True))
    # An image can't use the page's style; this orange is legible on light and dark backgrounds.
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f'<polyline points="{points}" fill="none" stroke="{ORANGE}" stroke-width="1.5"/></svg>'
    )
    return html.Img(
        src=f"data:image/svg+xml,{quote(svg)}",
        alt=f"{name}: from {line.y[0]:.3g} to {line.y[-1]:.3g}, between {line.y.min():.3g} and {line.y.max():.3g}",
        width=_WIDTH,
        height=_HEIGHT,
        className="sparkline",
    )


def _stretched(values: np.ndarray, pixels: int) -> np.ndarray:
    """Scales the values to pixels between the margins; equal values are in the middle."""
    low, high = values.min(), values.max()
    share = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    return _MARGIN + share * (pixels - 2 * _MARGIN)
