"""Cells of the table of runs: verdict, reward with its line, accuracy, difference to the run before, tags."""

from dataclasses import replace
from urllib.parse import quote

import numpy as np
from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.pages.frame import ICONS
from dashboard.queries import run_table as table
from dashboard.queries.run_table import ABSENT
from dashboard.queries.series import ChartLine
from dashboard.queries.verdict.rules import duration
from dashboard.read.model import OverviewRow
from dashboard.read.tokens import visible
from dashboard.views.blocks import number
from dashboard.views.colours import ORANGE

_WIDTH, _HEIGHT, _MARGIN = 96, 22, 2


def verdict(row: OverviewRow) -> Component:
    """Draws the run's state, and the worst of what else there is to say; each leads to its chart."""
    clause = table.attention(row)
    href = f"{address.run(row.run_id, clause.view)}#{clause.block}"
    state = html.Span(row.state, className=f"state {row.state}", title=_ages(row))
    if clause.level == "good" or clause.cause == row.state:
        return dcc.Link(state, href=href, title=clause.words)
    words = [html.Span(ICONS[clause.level], className="icon"), clause.cause]
    return html.Span([state, " ", dcc.Link(words, href=href, title=clause.words, className=f"level {clause.level}")])


def reward(row: OverviewRow) -> Component:
    """Draws the line and the newest mean reward; of supervised fine-tuning the loss."""
    name, drawn = table.curve(row)
    value = f"loss {number(row.loss, 3)}" if row.is_supervised else number(row.reward_mean, 3)
    return html.Span([_sparkline(drawn, name), html.Span(value)], className="with-line")


def accuracy(row: OverviewRow) -> str | Component:
    if row.accuracy is None:
        return ABSENT
    ends = table.interval(row)
    words = [f"{row.accuracy:.3f}", html.Span(f" {ends[0]:.2f}–{ends[1]:.2f}" if ends else "", className="none")]
    return html.Span(words, title=f"version {row.accuracy_version}{', with its 95 % interval' if ends else ''}")


def difference(row: OverviewRow, previous: OverviewRow | None) -> str | Component:
    """Draws the difference in accuracy to the last run of the same task, which leads to the comparison.

    It is grey unless the intervals are known and apart.
    """
    if previous is None:
        return ABSENT
    href = address.compare([row.run_id, previous.run_id])
    title = f"compare with {previous.run_id}, the run before it with the same prompts and reward"
    if row.accuracy is None or previous.accuracy is None:
        return dcc.Link("compare", href=href, title=title)
    own, other = table.interval(row), table.interval(previous)
    is_noise = own is None or other is None or (own[0] <= other[1] and other[0] <= own[1])
    text = f"{row.accuracy - previous.accuracy:+.3f}"
    note = "; the intervals overlap, or are unknown" if is_noise else ""
    return dcc.Link(text, href=href, title=f"{title}{note}", className="noise" if is_noise else "")


def staleness(row: OverviewRow) -> str | Component:
    if row.staleness_mean is None:
        return f"{ABSENT} of {row.max_staleness}"
    return html.Span(f"{row.staleness_mean:.2f} of {row.max_staleness}", title=f"largest: {row.staleness_max}")


def busiest(row: OverviewRow) -> str | Component:
    if (stage := table.busiest(row)) is None:
        return ABSENT
    every = ", ".join(f"{name} {1 - idle:.0%}" for name, idle in row.idle.items())
    href = f"{address.run(row.run_id, 'flow')}#flow-idle"
    return dcc.Link(f"{stage[0]} {stage[1]:.0%}", href=href, title=f"busy shares: {every}")


def note(at: address.OverviewPage, row: OverviewRow) -> list[str | Component]:
    """Draws the note, with its tags as links to the runs that have them."""
    words = list[str | Component]()
    for word in visible(row.note).split(" "):
        is_tag = word in table.tags(row)
        words += [dcc.Link(word, href=address.overview(replace(at, filter=word))) if is_tag else word, " "]
    return words


def _ages(row: OverviewRow) -> str:
    """Returns the age of each stage's oldest status record, of a running run."""
    if row.state != "running":
        return ""
    return "last status: " + ", ".join(f"{stage} {duration(age)} ago" for stage, age in row.ages.items())


def _sparkline(line: ChartLine, name: str) -> Component:
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
