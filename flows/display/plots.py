"""A line chart as one line of Markdown: an SVG image in a data URI, with its first and last values as alternative text.

It writes the SVG itself, so that reports have charts without the optional package matplotlib. The Prefect UI draws such
images in Markdown artifacts; its second version does not, and shows the alternative text.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape

from millrace.runs.history import Point

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 704, 34, 220
"""Edges of the plotted area."""
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#b45309", "#7c3aed", "#475569")
_TICKS = 5
_DOTS = 30
"""Lines of at most this many points mark each point, which shows how few there are."""


def line_chart(
    title: str,
    lines: Mapping[str, Sequence[Point]],
    *,
    band: Sequence[tuple[float, float, float]] = (),
    x_name: str = "policy version",
) -> str:
    """A Markdown image of `lines` (name → points by `x_name`, at least one point in all) under `title`.

    `band` are (x, low, high) of the first line's uncertainty.
    """
    ends = [
        f"{name} {points[0][1]:.4g} at {x_name} {points[0][0]:.0f}, {points[-1][1]:.4g} at {x_name} {points[-1][0]:.0f}"
        for name, points in lines.items()
        if points
    ]
    data = base64.b64encode(_svg(title, lines, band, x_name).encode()).decode()
    return f"![{title}: {'; '.join(ends)}](data:image/svg+xml;base64,{data})"


def _svg(
    title: str, lines: Mapping[str, Sequence[Point]], band: Sequence[tuple[float, float, float]], x_name: str
) -> str:
    all_points = [point for points in lines.values() for point in points]
    xs = _ticks([x for x, _ in all_points])
    ys = _ticks([0.0, *(y for _, y in all_points), *(high for _, _, high in band)])

    def pixels(points: Sequence[Point]) -> list[tuple[float, float]]:
        right, up = (_RIGHT - _LEFT) / (xs[-1] - xs[0]), (_BOTTOM - _TOP) / (ys[-1] - ys[0])
        return [(_LEFT + (x - xs[0]) * right, _BOTTOM - (y - ys[0]) * up) for x, y in points]

    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#ffffff"/>', _text(_LEFT, 22, title, size=15)]
    for y, (left, top) in zip(ys, pixels([(xs[0], y) for y in ys]), strict=True):
        parts.append(f'<path d="M{left} {top:.1f}H{_RIGHT}" stroke="#e5e7eb"/>')
        parts.append(_text(left - 8, top + 4, f"{y:,g}", anchor="end"))
    for x, (left, bottom) in zip(xs, pixels([(x, ys[0]) for x in xs]), strict=True):
        parts.append(_text(left, bottom + 18, f"{x:,g}", anchor="middle"))
    parts.append(_text(_RIGHT, _HEIGHT - 6, x_name, anchor="end"))
    if band:
        edge = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
        parts.append(f'<polygon points="{_corners(pixels(edge))}" fill="{_COLOURS[0]}" fill-opacity="0.15"/>')
    for number, (name, points) in enumerate(lines.items()):
        colour, dots = _COLOURS[number % len(_COLOURS)], pixels(points)
        parts.append(f'<polyline points="{_corners(dots)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(dots) <= _DOTS:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        if len(lines) > 1:
            parts.append(_text(_RIGHT - 90 * (len(lines) - 1 - number), 22, name, anchor="end", colour=colour))
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">{"".join(parts)}</svg>'


def _corners(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#1f2937") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {where} fill="{colour}">{escape(text)}</text>'


def _ticks(values: Sequence[float]) -> list[float]:
    """Evenly spaced round numbers that enclose `values`."""
    low, high = min(values), max(values)
    rough = (high - low or abs(high) or 1.0) / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [round(number * step, 12) for number in range(first, last + 1)]
