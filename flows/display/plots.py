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
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 40
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#b45309", "#7c3aed", "#475569")
_INK, _GRID = "#1f2937", "#e5e7eb"
_TICKS = 5
_DOTS = 30
"""Lines of at most this many points mark each point, which shows how few there are."""


def line_chart(
    title: str,
    lines: Mapping[str, Sequence[Point]],
    *,
    band: Sequence[tuple[float, float, float]] = (),
    x_name: str = "policy version",
    mark: tuple[str, Point] | None = None,
) -> str:
    """A Markdown image of `lines` (name → points by `x_name`, at least one point in all) under `title`.

    `band` are (x, low, high) of the first line's uncertainty. `mark` names a point.
    """
    data = base64.b64encode(_svg(title, lines, band, x_name, mark).encode()).decode()
    return f"![{_in_words(title, lines, x_name)}](data:image/svg+xml;base64,{data})"


def _in_words(title: str, lines: Mapping[str, Sequence[Point]], x_name: str) -> str:
    ends = [
        f"{name} {points[0][1]:.4g} at {x_name} {points[0][0]:.0f}, {points[-1][1]:.4g} at {x_name} {points[-1][0]:.0f}"
        for name, points in lines.items()
        if points
    ]
    return f"{title}: {'; '.join(ends)}"


def _svg(
    title: str,
    lines: Mapping[str, Sequence[Point]],
    band: Sequence[tuple[float, float, float]],
    x_name: str,
    mark: tuple[str, Point] | None,
) -> str:
    points = [point for some in lines.values() for point in some]
    xs = _ticks([x for x, _ in points])
    ys = _ticks([0.0, *(y for _, y in points), *(high for _, _, high in band)])
    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#ffffff"/>', _text(_LEFT, 22, title, size=15)]
    for y in ys:
        at = _y(y, ys)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>')
        parts.append(_text(_LEFT - 8, at + 4, f"{y:,g}", anchor="end"))
    parts += [_text(_x(x, xs), _HEIGHT - _BOTTOM + 18, f"{x:,g}", anchor="middle") for x in xs]
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 6, x_name, anchor="end"))
    if band:
        edge = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
        corners = " ".join(f"{_x(x, xs):.1f},{_y(y, ys):.1f}" for x, y in edge)
        parts.append(f'<polygon points="{corners}" fill="{_COLOURS[0]}" fill-opacity="0.15"/>')
    for number, (name, some) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [(_x(x, xs), _y(y, ys)) for x, y in some]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(places) <= _DOTS:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        if len(lines) > 1:
            parts.append(_text(_WIDTH - _RIGHT - 90 * (len(lines) - 1 - number), 22, name, anchor="end", colour=colour))
    if mark is not None:
        name, (at_x, at_y) = mark
        cx, cy = _x(at_x, xs), _y(at_y, ys)
        ring = f'cx="{cx:.1f}" cy="{cy:.1f}" r="7" fill="none" stroke="{_INK}" stroke-width="2"'
        parts += [f"<circle {ring}/>", _text(cx, cy - 12, name, anchor="middle")]
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = _INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
    )


def _ticks(values: Sequence[float]) -> list[float]:
    """Evenly spaced round numbers that enclose `values`."""
    low, high = min(values), max(values)
    rough = (high - low or abs(high) or 1.0) / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _x(x: float, ticks: Sequence[float]) -> float:
    return _LEFT + (x - ticks[0]) / (ticks[-1] - ticks[0]) * (_WIDTH - _LEFT - _RIGHT)


def _y(y: float, ticks: Sequence[float]) -> float:
    return _HEIGHT - _BOTTOM - (y - ticks[0]) / (ticks[-1] - ticks[0]) * (_HEIGHT - _TOP - _BOTTOM)
